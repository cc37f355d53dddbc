// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The board: memory owned by the agent, mapped by the agent and by each of its ranks. Page 0 is the header, page
// 1 + r the record of rank r, so that what a rank was doing can still be read after kill -9.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <linux/futex.h>

namespace resilient {

constexpr std::size_t page_bytes = 8192;                      // of the layout, not of the machine
constexpr std::uint64_t board_magic = 0x3130'4452'414F'4252;  // "RBOARD01", little endian
constexpr std::uint32_t board_version = 11;
constexpr std::uint32_t world_size_max = 65'536;
constexpr std::uint64_t commits_max = (std::uint64_t{1} << 56) - 1;
constexpr std::uint32_t phase_max = 255;
constexpr std::uint32_t announced_max = 3;
constexpr std::uint64_t computed_max = 128;
constexpr std::uint64_t calls_max = 256;

struct Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t world_size;
  std::uint32_t stop_generation;  // futex word of the watchdogs
  std::uint32_t bell;             // futex word of those who wait at the barrier
  std::uint64_t saves[2];         // of even and of odd updates: update << 2 | what its window begins with, see announce
  std::uint64_t settled;          // update whose checkpoint the agent is done with, written or not
  std::uint64_t pause;            // from this step on, + 1, all ranks stop where a window begins; 0: nobody wants it
  std::uint32_t report_asked;     // number of the newest report that the ranks are to write: see RankRecord::reported
};

// The word holds the thread id of the rank's watchdog; it is on that thread's robust list, so the kernel marks and
// wakes it when the thread dies, before it frees the memory of the process.
struct Life {
  struct robust_list node;
  std::uint32_t word;
};

// Of what a rank has in common with its replicas, at one moment: where two of them differ, one is wrong.
struct Fingerprint {
  std::uint64_t update;  // it is from before this one, + 1; 0: there is none
  std::uint64_t value;
};

// How long a rank has computed in one window, without what it has waited for the others.
struct Computed {
  std::uint64_t commits;  // updates with this one; 0: there is none
  std::uint64_t step;
  std::uint64_t ns;  // 0: the window was not like others
};

// A collective that a rank has begun: what its members compare, so that they see whether they mean the same one.
struct Call {
  std::uint64_t tag;  // of its place in the order of its group's collectives, the same on all members; 0: there is none
  std::uint64_t word;  // what is called there
};

struct RankRecord {
  std::uint64_t standing;  // commits << 8 | phase: one 8-byte store is the commit
  std::uint64_t step;
  std::uint64_t collectives;  // that span the job, entered since the window or the tail began
  std::uint32_t generation;
  std::uint32_t incarnation;
  std::uint32_t pid;
  std::uint32_t stopped_generation;  // futex word: the watchdog is done with the descriptors of older generations
  std::uint64_t beats;
  std::uint64_t tail_entered;
  std::uint64_t tail_completed;
  Life life;
  std::uint32_t activity;           // what the rank says it is at: protocol/progress.py
  std::uint32_t alarms;             // bits: what the rank's probes have found, see probes/alarm.hpp
  std::uint32_t order;              // a fault that an operator wants here: protocol/orders.py
  std::uint32_t asked;              // the signal by which somebody asked this process to end; the agent acts on it
  std::uint64_t kept[2];            // updates from before which this rank holds a complete snapshot in memory; 0: none
  Fingerprint replica[2];           // from before an even and before an odd update
  std::uint32_t reported;           // number of the newest report of its collectives that this rank has written
  Computed computed[computed_max];  // of the last updates: update c at c % computed_max
  Call calls[calls_max];            // the newest: at tag % calls_max
};

// Processes of different builds may map one board: the layout is a contract, a change needs a new version.
static_assert(offsetof(Header, version) == 8 && offsetof(Header, world_size) == 12);
static_assert(offsetof(Header, stop_generation) == 16 && offsetof(Header, bell) == 20);
static_assert(offsetof(Header, saves) == 24 && offsetof(Header, settled) == 40);
static_assert(offsetof(Header, pause) == 48 && offsetof(Header, report_asked) == 56);
static_assert(offsetof(RankRecord, standing) == 0 && offsetof(RankRecord, step) == 8);
static_assert(offsetof(RankRecord, collectives) == 16 && offsetof(RankRecord, generation) == 24);
static_assert(offsetof(RankRecord, incarnation) == 28 && offsetof(RankRecord, pid) == 32);
static_assert(offsetof(RankRecord, stopped_generation) == 36 && offsetof(RankRecord, beats) == 40);
static_assert(offsetof(RankRecord, tail_entered) == 48 && offsetof(RankRecord, tail_completed) == 56);
static_assert(offsetof(RankRecord, activity) == 80);
static_assert(offsetof(RankRecord, alarms) == 84 && offsetof(RankRecord, order) == 88);
static_assert(offsetof(RankRecord, asked) == 92 && offsetof(RankRecord, kept) == 96);
static_assert(offsetof(RankRecord, replica) == 112 && sizeof(Fingerprint) == 16);
static_assert(offsetof(RankRecord, reported) == 144);
static_assert(offsetof(RankRecord, computed) == 152 && sizeof(Computed) == 24);
static_assert(offsetof(RankRecord, calls) == 3224 && sizeof(Call) == 16);
static_assert(offsetof(RankRecord, life) == 64 && offsetof(Life, node) == 0 && offsetof(Life, word) == 8);
static_assert(sizeof(Header) <= page_bytes && sizeof(RankRecord) <= page_bytes);
static_assert(std::is_trivial_v<Header> && std::is_trivial_v<RankRecord>);
static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic_ref<std::uint32_t>::is_always_lock_free);

// Sequentially consistent on purpose: the barrier and the stop word rest on one order of all stores.
template <typename Word>
Word load(const Word& word) {
  return std::atomic_ref<Word>(const_cast<Word&>(word)).load(std::memory_order_seq_cst);
}
template <typename Word>
void store(Word& word, std::type_identity_t<Word> value) {
  std::atomic_ref<Word>(word).store(value, std::memory_order_seq_cst);
}
template <typename Word>
bool exchange_if(Word& word, std::type_identity_t<Word> expected, std::type_identity_t<Word> desired) {
  return std::atomic_ref<Word>(word).compare_exchange_strong(expected, desired, std::memory_order_seq_cst);
}
template <typename Word>
void increment(Word& word) {
  std::atomic_ref<Word>(word).fetch_add(1, std::memory_order_seq_cst);
}

template <typename Word>
void decrement(Word& word) {
  std::atomic_ref<Word>(word).fetch_sub(1, std::memory_order_seq_cst);
}

std::uint64_t realtime_ns();
std::int64_t monotonic_ns();

enum class WaitResult { passed, stopped, timeout };

// Shared by everyone in this process who uses the mapping: it is unmapped when the last one lets go, so a close
// in one thread cannot pull the memory from under another.
class Board {
 public:
  static std::shared_ptr<Board> create(std::uint32_t world_size);
  static std::shared_ptr<Board> attach(int fd);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  int fd() const { return fd_; }
  std::uint32_t world_size() const { return world_size_; }
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  RankRecord& record(std::uint32_t rank) const;

  void raise_stop(std::uint32_t generation);
  void set_standing(std::uint32_t rank, std::uint64_t commits, std::uint32_t phase, std::uint64_t step);
  bool arrive(std::uint32_t rank, std::uint64_t commits, std::uint32_t phase, std::uint64_t step);
  // Rank 0 announces what all ranks do before update `commits` when it stands before the update before: a barrier lies
  // between that and their look, and another one before the word is used again.
  void announce(std::uint64_t commits, std::uint32_t what);
  std::uint32_t announced(std::uint64_t commits) const;
  // Written before the barrier of that update, or before a Resume; whoever reads it behind finds what was written,
  // because the slot is used again for the update after next, which lies behind another barrier. 0: nothing was.
  void set_fingerprint(std::uint32_t rank, std::uint64_t commits, std::uint64_t value);
  std::uint64_t fingerprint(std::uint32_t rank, std::uint64_t commits) const;
  // Written before the standing that counts the update: whoever has seen that finds it, until it is used again.
  void set_computed(std::uint32_t rank, const Computed& window);
  // Those behind `after` that are still there, oldest first.
  std::vector<Computed> computed(std::uint32_t rank, std::uint64_t after) const;
  // The rank begins a collective. Its members write first and look at each other's then, so of two one at least sees
  // the other; a tag that others have overwritten by then is not found.
  void set_call(std::uint32_t rank, const Call& call);
  void forget_call(std::uint32_t rank, std::uint64_t tag);
  std::uint64_t call(std::uint32_t rank, std::uint64_t tag) const;  // its word; 0: it has not begun that one
  // Both return early (as a time-out) on a signal: the caller owns the deadline and runs the signal handlers.
  WaitResult wait_all(std::uint64_t target, std::uint32_t generation, std::int64_t timeout_ns);
  bool wait_stop(std::uint32_t generation, std::int64_t timeout_ns) const;

 private:
  Board(int fd, std::byte* memory, std::uint32_t world_size);
  bool all_reached(std::uint64_t target) const;

  const int fd_;
  std::byte* const memory_;
  const std::uint32_t world_size_;
  // What spinning earned lately, in nanoseconds; private to this process.
  std::atomic<std::int64_t> spin_ns_;
};

std::uint64_t make_standing(std::uint64_t commits, std::uint32_t phase);

}  // namespace resilient
