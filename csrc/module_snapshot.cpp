// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The parts for memory snapshots. Buffers are Python's own objects and stay exported as long as something native uses
// their memory, so that no mapping can be closed under a copy.
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "module.hpp"
#include "snapshot/copier.hpp"
#include "snapshot/memory.hpp"
#include "snapshot/nan.hpp"
#include "snapshot/sampled_words.hpp"
#include "snapshot/xxh3.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace resilient {
namespace {

// A buffer of Python's, exported while this lives. Made and ended with the GIL held.
class Buffer {
 public:
  Buffer(nb::handle object, bool writable) {
    const int flags = writable ? PyBUF_SIMPLE | PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

using PieceTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

class PyCopier {
 public:
  PyCopier(unsigned threads, int nice) : copier_(threads, nice) {}
  ~PyCopier() { abort(); }
  PyCopier(const PyCopier&) = delete;
  PyCopier& operator=(const PyCopier&) = delete;

  void start(Direction direction, nb::handle image, const std::vector<PieceTuple>& pieces, bool hashed,
             nb::object owner) {
    auto buffer = std::make_unique<Buffer>(image, direction == Direction::gather);
    copier_.start({buffer->data(), buffer->bytes(), listed(pieces), direction, hashed});
    image_ = std::move(buffer);
    owner_ = std::move(owner);
  }

  void hash(const std::vector<PieceTuple>& pieces, nb::object owner, nb::object after) {
    std::vector<Piece> parts = listed(pieces);
    const std::uint64_t bytes = parts.empty() ? 0 : parts.back().offset + parts.back().bytes;
    CopyJob job{nullptr, bytes, std::move(parts), Direction::gather, true};
    if (!after.is_none()) job.after = &nb::cast<PyCopier&>(after).copier_;
    if (job.after == &copier_) throw std::invalid_argument("a copy can't begin when it is over itself");
    copier_.start(std::move(job));
    image_.reset();
    owner_ = nb::make_tuple(std::move(owner), std::move(after));
  }

  void read(int fd, std::uint64_t offset, std::uint64_t bytes, const std::vector<PieceTuple>& pieces, bool hashed,
            nb::object owner) {
    if (fd < 0) throw std::invalid_argument("a descriptor is not below 0, as " + std::to_string(fd) + " is");
    copier_.start({nullptr, bytes, listed(pieces), Direction::scatter, hashed, fd, offset});
    image_.reset();
    owner_ = std::move(owner);
  }

  bool wait(std::int64_t timeout_ms) {
    try {
      const bool over = wait_in_slices(
          timeout_ms, [this](std::int64_t slice) { return copier_.wait(slice); }, [](bool each) { return each; });
      if (over) let_go();
      return over;
    } catch (const std::system_error&) {
      let_go();
      throw;
    }
  }

  void abort() {
    {
      const nb::gil_scoped_release unlocked;
      copier_.abort();
    }
    let_go();
  }

  bool done() const { return copier_.done(); }

  nb::bytes digests() const {
    const std::vector<Digest>& digests = copier_.digests();
    return nb::bytes(digests.data(), digests.size() * sizeof(Digest));
  }

 private:
  static std::vector<Piece> listed(const std::vector<PieceTuple>& tuples) {
    std::vector<Piece> pieces;
    pieces.reserve(tuples.size());
    for (const auto& [address, bytes, offset] : tuples) pieces.push_back({address, bytes, offset});
    return pieces;
  }

  void let_go() {
    image_.reset();
    owner_.reset();
  }

  Copier copier_;
  std::unique_ptr<Buffer> image_;
  nb::object owner_;
};

// 64 bits of memory that several processes share.
class PyWord {
 public:
  PyWord(nb::handle buffer, std::size_t offset) : buffer_(std::in_place, buffer, true) {
    if (offset > buffer_->bytes() || buffer_->bytes() - offset < sizeof(std::uint64_t)) {
      throw std::invalid_argument("the buffer has no 8 bytes at offset " + std::to_string(offset));
    }
    if ((reinterpret_cast<std::uintptr_t>(buffer_->data()) + offset) % sizeof(std::uint64_t) != 0) {
      throw std::invalid_argument("the word is not at a multiple of 8");
    }
    word_ = reinterpret_cast<std::uint64_t*>(buffer_->data() + offset);
  }

  std::uint64_t value() const { return load(use()); }
  bool exchange_if(std::uint64_t expected, std::uint64_t desired) const {
    return resilient::exchange_if(use(), expected, desired);
  }
  void close() { buffer_.reset(); }

 private:
  std::uint64_t& use() const {
    if (!buffer_) throw std::invalid_argument("the word is closed");
    return *word_;
  }

  std::optional<Buffer> buffer_;
  std::uint64_t* word_ = nullptr;
};

void populate_buffer(nb::handle object) {
  const Buffer buffer(object, true);
  const nb::gil_scoped_release unlocked;
  populate(buffer.data(), buffer.bytes());
}

bool buffer_holds_nan(nb::handle object, unsigned item_bytes, std::uint64_t largest) {
  const Buffer buffer(object, false);
  const nb::gil_scoped_release unlocked;
  return holds_nan(buffer.data(), buffer.bytes(), item_bytes, largest);
}

}  // namespace

void bind_snapshot(nb::module_& module) {
  const auto starter = [](Direction direction) {
    return [direction](PyCopier& self, nb::handle image, const std::vector<PieceTuple>& pieces, bool hashed,
                       nb::object owner) { self.start(direction, image, pieces, hashed, std::move(owner)); };
  };
  nb::class_<PyCopier>(module, "Copier")
      .def(nb::init<unsigned, int>(), "threads"_a = 2, nb::kw_only(), "nice"_a = 0)
      .def("gather", starter(Direction::gather), "image"_a, "pieces"_a, nb::kw_only(), "hashed"_a = true,
           "owner"_a = nb::none())
      .def("scatter", starter(Direction::scatter), "image"_a, "pieces"_a, nb::kw_only(), "hashed"_a = true,
           "owner"_a = nb::none())
      .def("hash", &PyCopier::hash, "pieces"_a, nb::kw_only(), "owner"_a = nb::none(), "after"_a = nb::none())
      .def("read", &PyCopier::read, "fd"_a, "offset"_a, "size"_a, "pieces"_a, nb::kw_only(), "hashed"_a = true,
           "owner"_a = nb::none())
      .def("wait", &PyCopier::wait, "timeout_ms"_a)
      .def_prop_ro("done", &PyCopier::done)
      .def("abort", &PyCopier::abort)
      .def("digests", &PyCopier::digests);
  nb::class_<SampledWords>(module, "SampledWords")
      .def(nb::init<const std::vector<std::pair<std::uint64_t, std::uint64_t>>&>(), "pieces"_a)
      .def("take", &SampledWords::take)
      .def("changed", &SampledWords::changed);
  nb::class_<PyWord>(module, "Word")
      .def(nb::init<nb::handle, std::size_t>(), "buffer"_a, "offset"_a)
      .def_prop_ro("value", &PyWord::value)
      .def("exchange_if", &PyWord::exchange_if, "expected"_a, "desired"_a)
      .def("close", &PyWord::close);
  module.def("populate", &populate_buffer, "buffer"_a);
  module.def("holds_nan", &buffer_holds_nan, "numbers"_a, "item_bytes"_a, "largest"_a);
  module.def("limit_instructions", [](const std::string& name) { return limit_instructions(name.c_str()); }, "name"_a);
  module.attr("DIGEST_CHUNK_BYTES") = nb::int_(digest_chunk_bytes);
}

}  // namespace resilient
