// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The copier, without Python. That the hash is XXH3 is for Python's tests to say, which have the library to compare
// with; here, that it is the same however the bytes arrive, and that threads, forks and aborts do no harm.
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "snapshot/copier.hpp"
#include "snapshot/memory.hpp"
#include "snapshot/nan.hpp"
#include "snapshot/sampled_words.hpp"
#include "snapshot/xxh3.hpp"

using namespace resilient;

namespace {

constexpr std::int64_t second_ns = 1'000'000'000;
using Bytes = std::vector<std::uint8_t>;

Bytes random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (std::uint8_t& each : bytes) each = static_cast<std::uint8_t>(random());
  return bytes;
}

struct Image {
  explicit Image(std::size_t count) : bytes(count) {
    memory =
        static_cast<std::byte*>(::mmap(nullptr, count + 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    CHECK(memory != MAP_FAILED);
    std::memset(memory, 0xFF, count + 1);
  }
  ~Image() { ::munmap(memory, bytes + 1); }
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  std::byte* memory = nullptr;
  std::size_t bytes;
};

// An image in a file, behind something else.
struct File {
  File(const Image& image, std::size_t before) : fd(::memfd_create("image", MFD_CLOEXEC)), start(before) {
    CHECK(fd >= 0 && ::lseek(fd, static_cast<off_t>(before), SEEK_SET) >= 0);
    bytes = image.bytes;
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t count = ::write(fd, image.memory + done, bytes - done);
      CHECK(count > 0);
      done += static_cast<std::size_t>(count);
    }
  }
  ~File() { ::close(fd); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  CopyJob job(std::vector<Piece> pieces) const {
    return {nullptr, bytes, std::move(pieces), Direction::scatter, true, fd, start};
  }

  int fd;
  std::size_t start;
  std::size_t bytes = 0;
};

// Pieces of odd sizes with gaps, their memory, and the image that they make.
struct Layout {
  Layout(std::size_t bytes, std::size_t piece_bytes_max, unsigned seed) : expected(bytes) {
    std::mt19937 random(seed);
    for (std::size_t at = random() % 3; at < bytes;) {
      const std::size_t count = std::min<std::size_t>(1 + random() % piece_bytes_max, bytes - at);
      sources.push_back(random_bytes(count, seed + static_cast<unsigned>(at)));
      pieces.push_back({reinterpret_cast<std::uintptr_t>(sources.back().data()), count, at});
      std::memcpy(expected.data() + at, sources.back().data(), count);
      at += count + (random() % 4 == 0 ? random() % 100 : 0);
    }
  }

  CopyJob job(const Image& image, Direction direction) const {
    return {image.memory, image.bytes, pieces, direction, true};
  }

  std::vector<Bytes> sources;
  std::vector<Piece> pieces;
  Bytes expected;
};

std::vector<Digest> digests_of(const Bytes& image) {
  std::vector<Digest> digests;
  for (std::size_t at = 0; at < image.size(); at += digest_chunk_bytes) {
    digests.push_back(xxh3_128(image.data() + at, std::min(digest_chunk_bytes, image.size() - at)));
  }
  return digests;
}

void finish(Copier& copier) {
  CHECK(eventually([&] { return copier.wait(second_ns); }));
}

void test_pieces_in_blocks_hash_like_one() {
  for (const std::size_t bytes : {241, 1024, 1025, 4096, 100'000}) {
    const Bytes data = random_bytes(bytes, 7);
    for (const char* name : {"portable", "sse2", "avx2"}) {
      if (!limit_instructions(name)) continue;
      const Digest whole = xxh3_128(data.data(), bytes);
      for (std::size_t split = 0; split + xxh3_stripe_bytes <= bytes && split < bytes; split += xxh3_block_bytes) {
        Xxh3Stream stream;
        stream.add_blocks(data.data(), split);
        CHECK(stream.finish(data.data() + split, bytes - split) == whole);
      }
      CHECK(limit_instructions("portable") && xxh3_128(data.data(), bytes) == whole);
    }
  }
  CHECK(!limit_instructions("abacus"));
  CHECK(limit_instructions("avx2") || limit_instructions("sse2") || limit_instructions("portable"));
}

void test_there_and_back() {
  Copier copier(3, 0);
  for (const std::size_t bytes : {1UL, 63UL, 240UL, 241UL, 16'384UL, 16'447UL, 16'448UL, 100'001UL, 4'194'304UL,
                                  4'194'305UL, 4'194'368UL, 9'000'000UL}) {
    for (const std::size_t piece_bytes_max : {1'000UL, 3'000'000UL}) {
      Layout layout(bytes, piece_bytes_max, static_cast<unsigned>(bytes));
      const Image image(bytes);
      copier.start(layout.job(image, Direction::gather));
      finish(copier);
      CHECK(std::memcmp(image.memory, layout.expected.data(), bytes) == 0);
      CHECK(image.memory[bytes] == std::byte{0xFF});
      CHECK(copier.digests() == digests_of(layout.expected));
      copier.start({nullptr, bytes, layout.pieces, Direction::gather, true});
      finish(copier);
      CHECK(copier.digests() == digests_of(layout.expected));
      const std::vector<Bytes> before = layout.sources;
      for (Bytes& each : layout.sources) std::fill(each.begin(), each.end(), std::uint8_t{0});
      copier.start(layout.job(image, Direction::scatter));
      finish(copier);
      CHECK(layout.sources == before);
      CHECK(copier.digests() == digests_of(layout.expected));
      for (Bytes& each : layout.sources) std::fill(each.begin(), each.end(), std::uint8_t{0});
      const File file(image, 77);
      copier.start(file.job(layout.pieces));
      finish(copier);
      CHECK(layout.sources == before);
      CHECK(copier.digests() == digests_of(layout.expected));
    }
  }
}

// Fails in one thread while others read; the next job knows nothing of it.
void test_a_file_that_ends_early() {
  const Image image(40'000'000);
  const File whole(image, 0);
  CopyJob too_long = whole.job({});
  too_long.image_bytes += 1;
  CopyJob no_file = whole.job({});
  no_file.fd = 1 << 20;
  Copier copier(3, 0);
  for (int round = 0; round < 5; ++round) {
    for (const auto& [job, code] : {std::pair{too_long, ENODATA}, std::pair{no_file, EBADF}}) {
      copier.start(job);
      int found = 0;
      try {
        finish(copier);
      } catch (const std::system_error& error) {
        found = error.code().value();
      }
      CHECK(found == code && copier.done());
      check_throws<std::logic_error>([&] { (void)copier.digests(); });
    }
    copier.start(whole.job({}));
    finish(copier);
    CHECK(copier.digests().size() == 10);
  }
  CopyJob both = whole.job({});
  both.image = image.memory;
  check_throws<std::invalid_argument>([&] { copier.start(both); });
  CopyJob into_file = whole.job({});
  into_file.direction = Direction::gather;
  check_throws<std::invalid_argument>([&] { copier.start(into_file); });
}

void test_refused_jobs() {
  Copier copier(1, 0);
  const Image image(4096);
  const auto start = [&](std::vector<Piece> pieces, std::size_t shift = 0) {
    copier.start({image.memory + shift, 4000, std::move(pieces), Direction::gather, true});
  };
  check_throws<std::invalid_argument>([&] { start({{1, 100, 3'901}}); });
  check_throws<std::invalid_argument>([&] { start({{1, ~std::uint64_t{0}, 1}}); });
  check_throws<std::invalid_argument>([&] { start({{1, 100, 0}, {1, 100, 99}}); });
  check_throws<std::invalid_argument>([&] { start({{0, 1, 0}}); });
  check_throws<std::invalid_argument>([&] { start({}, 8); });
  check_throws<std::logic_error>([&] { (void)copier.wait(0); });
  check_throws<std::logic_error>([&] { (void)copier.digests(); });
  check_throws<std::invalid_argument>([] { Copier(0, 0); });
  check_throws<std::invalid_argument>([] { Copier(1, 20); });
  start({{0, 0, 0}});
  finish(copier);
  CHECK(copier.digests().size() == 1);
}

void test_one_at_a_time_and_abort() {
  const Bytes source = random_bytes(16'000'000, 3);
  const Image image(source.size());
  const CopyJob job{image.memory,
                    source.size(),
                    {{reinterpret_cast<std::uintptr_t>(source.data()), source.size(), 0}},
                    Direction::gather,
                    true};
  Copier copier(2, 5);
  copier.abort();  // of nothing
  int refused = 0;
  for (int round = 0; round < 20; ++round) {
    copier.start(job);
    try {
      copier.start(job);
    } catch (const std::logic_error&) {
      ++refused;
    }
    if (round % 2 == 0) {
      copier.abort();
      CHECK(copier.done());
      std::memset(image.memory, round, 64);  // nobody else writes any more: ThreadSanitizer would say so
    } else {
      finish(copier);
      CHECK(std::memcmp(image.memory, source.data(), source.size()) == 0);
    }
  }
  CHECK(refused > 0);  // not each time: the first may be over already on a busy machine
  copier.start(job);   // and is destroyed while it runs
}

// The caller does it, and the next copy finds threads again.
void test_without_threads() {
  const pid_t child = ::fork();
  if (child == 0) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NPROC, &limit);
    const rlimit none{0, limit.rlim_max};
    if (::setrlimit(RLIMIT_NPROC, &none) != 0) ::_exit(1);
    if (::getuid() == 0 && ::setuid(65534) != 0) ::_exit(2);  // root has no limit
    const Bytes source = random_bytes(3'000'000, 4);
    const Image image(source.size());
    Copier copier(2, 0);
    const CopyJob job{image.memory,
                      source.size(),
                      {{reinterpret_cast<std::uintptr_t>(source.data()), source.size(), 0}},
                      Direction::gather,
                      true};
    copier.start(job);
    if (!copier.done() || !copier.wait(0)) ::_exit(3);  // it was over when start() returned: there was no thread
    const bool same = std::memcmp(image.memory, source.data(), source.size()) == 0 && copier.digests().size() > 0;
    if (::setrlimit(RLIMIT_NPROC, &limit) != 0) ::_exit(5);
    std::memset(image.memory, 0, source.size());
    copier.start(job);
    finish(copier);
    ::_exit(same && std::memcmp(image.memory, source.data(), source.size()) == 0 ? 0 : 4);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// A fork gets threads of its own, in whatever state its parent's were.
void test_forks() {
  const Bytes source = random_bytes(9'000'000, 5);
  const Image image(source.size());
  const Image other(source.size());
  const auto job_into = [&](const Image& target) {
    return CopyJob{target.memory,
                   source.size(),
                   {{reinterpret_cast<std::uintptr_t>(source.data()), source.size(), 0}},
                   Direction::gather,
                   true};
  };
  auto copier = std::make_unique<Copier>(2, 0);
  for (int round = 0; round < 5; ++round) {
    copier->start(job_into(image));
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
      check_throws<std::logic_error>([&] { (void)copier->wait(0); });
      copier->abort();
// The sanitizers' own locks know no fork: ThreadSanitizer can't follow new threads in the fork of a process that has
// some, and AddressSanitizer of gcc 12 may leave a lock held that a thread of the parent had as it began.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
      copier->start(job_into(other));
      finish(*copier);
      CHECK(copier->digests() == digests_of(source));
      copier.reset();
#endif
      std::_Exit(0);
    }
    finish(*copier);
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child && status == 0);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    CHECK(std::memcmp(other.memory, source.data(), source.size()) == 0);
#endif
  }
}

void test_populate() {
  const Image image(5 * 4096 - 1);
  std::memcpy(image.memory + 4096, "kept", 5);
  populate(image.memory, image.bytes);
  touch_pages(image.memory, image.bytes);
  CHECK(std::strcmp(reinterpret_cast<char*>(image.memory) + 4096, "kept") == 0);
  check_throws<std::system_error>([&] { populate(nullptr, 4096); });
}

// At each place of several blocks and a tail, in memory that ends there.
void test_nan() {
  constexpr std::size_t count = 2 * 4096 / sizeof(float) + 3;
  std::unique_ptr<std::byte[]> memory(new std::byte[count * sizeof(float)]());
  const std::uint32_t nan = 0xFFC0'0000, infinity = 0x7F80'0000;
  for (std::size_t at = 0; at < count; ++at) {
    std::byte* number = memory.get() + at * sizeof(float);
    std::memcpy(number, &infinity, sizeof infinity);
    CHECK(!holds_nan(memory.get(), count * sizeof(float), sizeof(float), infinity));
    std::memcpy(number, &nan, sizeof nan);
    CHECK(holds_nan(memory.get(), count * sizeof(float), sizeof(float), infinity));
    CHECK(!holds_nan(memory.get(), at * sizeof(float) + 3, sizeof(float), infinity));
    std::memset(number, 0, sizeof nan);
  }
  CHECK(!holds_nan(nullptr, 0, 8, 1));
}

void test_sampled_words() {
  std::vector<std::uint32_t> one(7, 5);
  std::vector<std::uint32_t> other(1, 6);
  const auto at = [](const std::vector<std::uint32_t>& words) { return reinterpret_cast<std::uint64_t>(words.data()); };
  SampledWords sampled({{at(one), 28}, {0, 400}, {at(other), 3}, {at(other), 4}});
  std::size_t seen = 0;
  for (int turn = 0; turn < 7; ++turn) {
    sampled.take();
    CHECK(sampled.changed().empty());
    ++one[3];
    seen += sampled.changed().size();
  }
  CHECK(seen == 1);  // each word in its turn
  sampled.take();
  ++other[0];
  CHECK(sampled.changed() == std::vector<std::uint32_t>{3});
}

}  // namespace

int main() {
  test_pieces_in_blocks_hash_like_one();
  test_there_and_back();
  test_a_file_that_ends_early();
  test_refused_jobs();
  test_one_at_a_time_and_abort();
  test_without_threads();
  test_forks();
  test_populate();
  test_nan();
  test_sampled_words();
  std::puts("snapshot_test: all passed");
  return 0;
}
