// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "snapshot/copier.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "native_thread.hpp"
#include "snapshot/stream_copy.hpp"

namespace resilient {
namespace {

constexpr std::size_t block_bytes = 16384;
// Copied and hashed in turn: the copy waits for memory, the hash computes. In larger steps they hide each other less.
constexpr std::size_t step_bytes = xxh3_block_bytes;
constexpr std::size_t ahead_bytes = 4096;
// Of a file at once: large enough to forget the call, and it still lies in the second cache when it is copied on.
constexpr std::size_t read_bytes = 262144;
static_assert(block_bytes % step_bytes == 0 && digest_chunk_bytes % block_bytes == 0);
static_assert(read_bytes % step_bytes == 0 && digest_chunk_bytes % read_bytes == 0);
constexpr std::size_t image_alignment = 64;

std::uint8_t* pointer(std::uint64_t address) {
  return reinterpret_cast<std::uint8_t*>(static_cast<std::uintptr_t>(address));
}

std::uint64_t end_of(const Piece& piece) { return piece.offset + piece.bytes; }

void check(CopyJob& job) {
  if (job.fd >= 0 && (job.direction != Direction::scatter || job.image != nullptr)) {
    throw std::invalid_argument("a file is only copied out of");
  }
  std::erase_if(job.pieces, [](const Piece& piece) { return piece.bytes == 0; });
  if (job.direction == Direction::gather && reinterpret_cast<std::uintptr_t>(job.image) % image_alignment != 0) {
    throw std::invalid_argument("an image to be written must begin at a multiple of 64 bytes");
  }
  std::uint64_t covered = 0;
  for (const Piece& piece : job.pieces) {
    if (piece.offset < covered) {
      throw std::invalid_argument("the piece at offset " + std::to_string(piece.offset) +
                                  " begins before the end of the one before it, " + std::to_string(covered));
    }
    if (piece.bytes > job.image_bytes || piece.offset > job.image_bytes - piece.bytes) {
      throw std::invalid_argument("the piece of " + std::to_string(piece.bytes) + " bytes at offset " +
                                  std::to_string(piece.offset) + " does not fit into an image of " +
                                  std::to_string(job.image_bytes) + " bytes");
    }
    if (piece.address == 0) throw std::invalid_argument("a piece has the address 0");
    covered = end_of(piece);
  }
}

void read_whole(int fd, std::uint64_t offset, std::uint8_t* to, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t count = ::pread(fd, to, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) throw std::system_error(count < 0 ? errno : ENODATA, std::generic_category(), "pread");
    to += count;
    offset += static_cast<std::uint64_t>(count);
    bytes -= static_cast<std::size_t>(count);
  }
}

std::size_t block_bytes_of(const CopyJob& job) { return job.fd < 0 ? block_bytes : read_bytes; }

// What a thread works in: a block that is put together, or what it has read. Made by who starts the job: a thread that
// allocates may hold the allocator's locks at the moment of a fork.
class Scratch {
 public:
  void make_room_for(const CopyJob& job) {
    const std::size_t lines = (block_bytes_of(job) + xxh3_stripe_bytes) / sizeof(Line);
    if (lines_.size() < lines) lines_.resize(lines);
  }
  std::uint8_t* data() { return lines_.front().bytes; }

 private:
  struct alignas(64) Line {
    std::uint8_t bytes[64];
  };
  std::vector<Line> lines_;
};

// One chunk of the image, block by block.
class ChunkCopy {
 public:
  ChunkCopy(const CopyJob& job, std::uint64_t begin, Scratch& scratch)
      : job_(job),
        begin_(begin),
        bytes_(std::min<std::uint64_t>(digest_chunk_bytes, job.image_bytes - begin)),
        scratch_(scratch.data()) {
    piece_ = std::upper_bound(job.pieces.begin(), job.pieces.end(), begin,
                              [](std::uint64_t at, const Piece& piece) { return at < end_of(piece); });
  }

  Digest run() {
    Digest digest{};
    const std::size_t block_max = block_bytes_of(job_);
    for (std::uint64_t at = 0; at < bytes_;) {
      const std::uint64_t left = bytes_ - at;
      // The hash wants the last 64 bytes of a chunk in one piece: a shorter rest is part of the block before it.
      const bool last = left < block_max + xxh3_stripe_bytes;
      const std::size_t bytes = last ? left : block_max;
      const bool gathers = job_.direction == Direction::gather;
      const std::uint8_t* const block = gathers ? collect(begin_ + at, bytes) : held(at, bytes);
      for (std::size_t done = 0; done < bytes; done += step_bytes) {
        const std::size_t step = std::min(step_bytes, bytes - done);
        fetch_ahead(block + done);
        if (gathers && job_.image != nullptr) {
          stream_copy(image() + at + done, block + done, step);
        } else if (!gathers) {
          distribute(block + done, begin_ + at + done, step);
        }
        if (job_.hashed && !last) stream_.add_blocks(block + done, step);
      }
      if (job_.hashed && last) digest = finish(block, bytes);
      at += bytes;
    }
    stream_fence();
    return digest;
  }

 private:
  std::uint8_t* image() const { return reinterpret_cast<std::uint8_t*>(job_.image) + begin_; }

  // The machine's own prefetching stops at the end of a page. May point behind the source: that is no access.
  static void fetch_ahead(const std::uint8_t* at) {
    for (std::size_t line = 0; line < step_bytes; line += 64) __builtin_prefetch(at + ahead_bytes + line);
  }

  Digest finish(const std::uint8_t* block, std::size_t bytes) {
    return bytes_ <= xxh3_short_bytes_max ? xxh3_128(block, bytes) : stream_.finish(block, bytes);
  }

  // The bytes of an image that is copied out of, `at` bytes behind the chunk's begin.
  const std::uint8_t* held(std::uint64_t at, std::size_t bytes) {
    if (job_.fd < 0) return image() + at;
    read_whole(job_.fd, job_.file_offset + begin_ + at, scratch_, bytes);
    return scratch_;
  }

  // The bytes of the image at `offset` where they lie, if that is one place, else put together in the scratch block.
  const std::uint8_t* collect(std::uint64_t offset, std::size_t bytes) {
    const std::uint64_t end = offset + bytes;
    while (piece_ != job_.pieces.end() && end_of(*piece_) <= offset) ++piece_;
    if (piece_ != job_.pieces.end() && piece_->offset <= offset && end_of(*piece_) >= end) {
      return pointer(piece_->address + (offset - piece_->offset));
    }
    std::uint64_t filled = offset;
    for (auto each = piece_; each != job_.pieces.end() && each->offset < end; ++each) {
      const std::uint64_t from = std::max(each->offset, offset);
      const std::uint64_t to = std::min(end_of(*each), end);
      std::memset(scratch_ + (filled - offset), 0, from - filled);
      std::memcpy(scratch_ + (from - offset), pointer(each->address + (from - each->offset)), to - from);
      filled = to;
    }
    std::memset(scratch_ + (filled - offset), 0, end - filled);
    return scratch_;
  }

  void distribute(const std::uint8_t* block, std::uint64_t offset, std::size_t bytes) {
    const std::uint64_t end = offset + bytes;
    while (piece_ != job_.pieces.end() && end_of(*piece_) <= offset) ++piece_;
    for (auto each = piece_; each != job_.pieces.end() && each->offset < end; ++each) {
      const std::uint64_t from = std::max(each->offset, offset);
      const std::uint64_t to = std::min(end_of(*each), end);
      stream_copy(pointer(each->address + (from - each->offset)), block + (from - offset), to - from);
    }
  }

  const CopyJob& job_;
  const std::uint64_t begin_;
  const std::uint64_t bytes_;
  std::vector<Piece>::const_iterator piece_;  // the first that ends behind where we are
  Xxh3Stream stream_;
  std::uint8_t* const scratch_;
};

enum class Outcome { none, running, complete, aborted, failed };

}  // namespace

// Of one process: a fork leaves its parent's behind, since locks and threads are copied in whatever state they are.
struct Copier::Pool {
  const pid_t pid = ::getpid();
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::condition_variable has_work;
  std::condition_variable is_over;
  bool closing = false;
  Outcome outcome = Outcome::none;
  unsigned working = 0;
  // Written while no thread is working only, so threads at work read them without the mutex.
  CopyJob job;
  std::vector<Scratch> scratches;  // one for each thread
  std::vector<Digest> digests;
  std::uint64_t chunks = 0;
  std::exception_ptr error;  // the first one; with Outcome::failed
  std::atomic<std::uint64_t> next_chunk{0};

  // Under the mutex, as all that follows but run_chunks.
  bool over() const { return outcome != Outcome::running && working == 0; }

  bool has_chunks() const { return outcome == Outcome::running && next_chunk.load() < chunks; }

  void run_chunks(Scratch& scratch) {
    for (;;) {
      const std::uint64_t index = next_chunk.fetch_add(1);
      if (index >= chunks) return;
      const Digest digest = ChunkCopy(job, index * digest_chunk_bytes, scratch).run();
      if (job.hashed) digests[index] = digest;
    }
  }

  // Under the mutex.
  void fail(std::exception_ptr why) {
    next_chunk = chunks;
    if (outcome != Outcome::running) return;
    outcome = Outcome::failed;
    error = std::move(why);
  }

  void work(std::size_t number, int nice) {
    if (nice > 0) {
      // Of the thread alone, and downwards only, which is always allowed.
      const int result = ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), nice);
      assert(result == 0);
      (void)result;
    }
    std::unique_lock lock(mutex);
    for (;;) {
      has_work.wait(lock, [this] { return closing || has_chunks(); });
      if (closing) return;
      take_part(lock, scratches[number]);
    }
  }

  // The mutex is let go of meanwhile.
  void take_part(std::unique_lock<std::mutex>& lock, Scratch& scratch) {
    ++working;
    lock.unlock();
    std::exception_ptr thrown;
    try {
      if (job.after != nullptr) job.after->wait_over();
      run_chunks(scratch);
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    if (thrown) fail(std::move(thrown));
    if (--working == 0) {  // all chunks have been taken, and whoever took one is done
      if (outcome == Outcome::running) outcome = Outcome::complete;
      is_over.notify_all();
    }
  }
};

Copier::Copier(unsigned threads, int nice) : threads_(threads), nice_(nice) {
  if (threads < 1 || threads > 64) throw std::invalid_argument("threads must be 1..64, not " + std::to_string(threads));
  if (nice < 0 || nice > 19) throw std::invalid_argument("nice must be 0..19, not " + std::to_string(nice));
}

Copier::~Copier() {
  if (pool_ == nullptr || pool_->pid != ::getpid()) return;  // a fork's copy of its parent's pool: nothing to end
  abort();
  {
    const std::scoped_lock lock(pool_->mutex);
    pool_->closing = true;
  }
  pool_->has_work.notify_all();
  for (std::thread& thread : pool_->threads) thread.join();
  delete pool_;
}

Copier::Pool& Copier::ready_pool() {
  if (pool_ == nullptr || pool_->pid != ::getpid()) pool_ = new Pool();
  try {
    while (pool_->threads.size() < threads_) {
      const std::size_t number = pool_->threads.size();
      pool_->threads.push_back(
          start_native_thread("rt-copy", [pool = pool_, number, nice = nice_] { pool->work(number, nice); }));
    }
  } catch (const std::system_error&) {
    // No more threads to be had (ulimit -u, pids.max): those that there are do it, or the caller; the next copy tries
    // again. A job must not end, or save nothing any more, since there was none for a moment.
  }
  return *pool_;
}

Copier::Pool& Copier::own_pool() const {
  if (pool_ == nullptr || pool_->pid != ::getpid()) throw std::logic_error("no copy was started in this process");
  return *pool_;
}

void Copier::start(CopyJob job) {
  check(job);
  Pool& pool = ready_pool();
  {
    std::unique_lock lock(pool.mutex);
    if (pool.outcome == Outcome::running || pool.working > 0) {
      throw std::logic_error("a copy is under way: wait for it, or abort it");
    }
    pool.job = std::move(job);
    pool.scratches.resize(threads_);
    for (Scratch& each : pool.scratches) each.make_room_for(pool.job);
    pool.chunks = (pool.job.image_bytes + digest_chunk_bytes - 1) / digest_chunk_bytes;
    pool.digests.assign(pool.job.hashed ? pool.chunks : 0, Digest{});
    pool.next_chunk = 0;
    pool.error = nullptr;
    pool.outcome = pool.chunks > 0 ? Outcome::running : Outcome::complete;
    if (pool.threads.empty() && pool.has_chunks()) pool.take_part(lock, pool.scratches.front());
  }
  pool.has_work.notify_all();
}

bool Copier::wait(std::int64_t timeout_ns) {
  Pool& pool = own_pool();
  std::unique_lock lock(pool.mutex);
  if (pool.outcome == Outcome::none) throw std::logic_error("no copy was started in this process");
  if (!pool.is_over.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&pool] { return pool.over(); })) return false;
  if (pool.outcome == Outcome::failed) std::rethrow_exception(pool.error);
  return true;
}

void Copier::wait_over() {
  if (pool_ == nullptr || pool_->pid != ::getpid()) return;
  std::unique_lock lock(pool_->mutex);
  pool_->is_over.wait(lock, [this] { return pool_->over(); });
}

bool Copier::done() const {
  Pool& pool = own_pool();
  const std::scoped_lock lock(pool.mutex);
  return pool.over();
}

void Copier::abort() {
  if (pool_ == nullptr || pool_->pid != ::getpid()) return;
  std::unique_lock lock(pool_->mutex);
  if (pool_->outcome == Outcome::running) {
    pool_->next_chunk = pool_->chunks;
    pool_->outcome = Outcome::aborted;
    pool_->is_over.notify_all();  // no thread may have begun
  }
  pool_->is_over.wait(lock, [this] { return pool_->working == 0; });
}

const std::vector<Digest>& Copier::digests() const {
  const Pool& pool = own_pool();
  if (!done() || pool.outcome != Outcome::complete) throw std::logic_error("the copy has not run to its end");
  if (!pool.job.hashed) throw std::logic_error("the copy was not asked to hash");
  return pool.digests;
}

}  // namespace resilient
