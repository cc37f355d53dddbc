// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// Copies pieces of memory into an image, or out of one, behind the caller's back, and hashes the image in the same
// pass: a digest for every 4 MiB of it, made while the bytes are in the cache for the copy. An image to be copied out
// of may also lie in a file: reading it costs less than mapping it, whose pages the kernel has to enter one by one.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/types.h>

#include "snapshot/xxh3.hpp"

namespace resilient {

constexpr std::size_t digest_chunk_bytes = std::size_t{4} << 20;

struct Piece {
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint64_t offset;  // in the image
};

enum class Direction { gather, scatter };  // pieces -> image; image -> pieces

class Copier;

struct CopyJob {
  std::byte* image = nullptr;  // gather: a multiple of 64, or null: what it would be is only hashed
  std::uint64_t image_bytes = 0;
  std::vector<Piece> pieces;  // by offset, not overlapping, inside the image; gaps are zeros after a gather
  Direction direction = Direction::gather;
  bool hashed = true;
  // Of a scatter alone, and `image` is null then: the file with the image, which begins at `file_offset`. Stays open.
  int fd = -1;
  std::uint64_t file_offset = 0;
  // Begins when the job that this one is at is over, however it ends. Stays alive, and gets no other job meanwhile.
  Copier* after = nullptr;
};

// One job at a time, on threads of its own that take one chunk after the other. They are started by the first job and
// in no process but the one that asks: a fork has no threads, and gets new ones when it starts a job itself.
class Copier {
 public:
  // `nice` is added to the niceness of the threads, which can't be taken back.
  Copier(unsigned threads, int nice);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Throws std::invalid_argument for a job that is not as said above, std::logic_error while another is under way.
  void start(CopyJob job);
  // True if the job is over. False early, too, when woken for nothing. std::logic_error if there is none;
  // std::system_error if it is over because its file can't be read (ENODATA: it ends before the image does).
  bool wait(std::int64_t timeout_ns);
  bool done() const;
  // Returns when the job is over, however; at once if this process has started none.
  void wait_over();
  // No new chunks; returns when those under way are copied (4 MiB each). What was copied until then stays.
  void abort();
  // Of the last job, one for each chunk of the image. std::logic_error unless it ran to its end, and hashed.
  const std::vector<Digest>& digests() const;

 private:
  struct Pool;
  Pool& ready_pool();
  Pool& own_pool() const;

  const unsigned threads_;
  const int nice_;
  Pool* pool_ = nullptr;
};

}  // namespace resilient
