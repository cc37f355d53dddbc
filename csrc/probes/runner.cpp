// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/runner.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include <sys/eventfd.h>
#include <unistd.h>

#include "futex.hpp"
#include "native_thread.hpp"
#include "probes/trial.hpp"
#include "record.hpp"

namespace resilient {
namespace {

constexpr std::int64_t ns_per_ms = 1'000'000;
constexpr std::size_t findings_max = 1024;  // nobody takes them: the first ones say most
constexpr std::int64_t claimed = -1;        // a deadline that the supervisor has taken

enum class State { waiting, opening, polling, absent, disabled, stopped };

constexpr const char* name_of(State state) {
  constexpr const char* names[] = {"waiting", "opening", "polling", "absent", "disabled", "stopped"};
  return names[static_cast<int>(state)];
}

// The supervisor has given up on this thread: it ends as soon as it can.
struct Abandoned {};

}  // namespace

struct ProbeRunner::Shared {
  ~Shared() {
    if (event_fd >= 0) ::close(event_fd);
  }
  void publish(Finding finding);
  bool is_stopping() const { return load(stopping) != 0; }
  void supervise(std::int64_t interval_ns);

  const pid_t owner_pid = ::getpid();
  int event_fd = -1;
  std::uint32_t stopping = 0;  // futex word
  std::uint32_t epoch = 0;     // grows with every rearm
  std::vector<std::shared_ptr<Worker>> workers;
  std::thread supervisor;
  std::function<void(const Finding&)> listener;

  std::mutex mutex;  // over the findings
  std::vector<Finding> findings;
};

void ProbeRunner::Shared::publish(Finding finding) {
  finding.time_ns = realtime_ns();
  const Finding told = finding;
  {
    const std::lock_guard lock(mutex);
    if (findings.size() < findings_max) findings.push_back(std::move(finding));
  }
  // After it can be taken: whoever acts on the alarm finds it.
  if (listener) listener(told);
  const std::uint64_t one = 1;
  const ssize_t written = ::write(event_fd, &one, sizeof(one));
  (void)written;  // a full counter is readable all the same
}

class ProbeRunner::Worker final : public Calls {
 public:
  Worker(std::shared_ptr<Shared> shared, std::shared_ptr<Probe> probe, RunnerOptions options)
      : shared_(std::move(shared)), probe_(std::move(probe)), options_(options) {
    status_.name = probe_->name();
    status_.state = name_of(State::waiting);
  }

  static void start(const std::shared_ptr<Worker>& worker) {
    worker->thread_ = start_native_thread("rt-probe", [worker] { worker->run(); });
  }
  void publish(Finding finding) override { shared_->publish(std::move(finding)); }
  void lack(std::string ability) override;
  // The supervisor's look, twice too late in a row: one look alone may come right after this process was stopped for a
  // while, before our thread had its turn.
  void check_deadline(std::int64_t now_ns);
  // True if the thread has ended; else it is left where it is.
  bool join(std::int64_t end_ns);
  ProbeStatus status() const;

 private:
  void begin(const char* name) override;
  void end() override;
  void run();
  void work();
  bool open();
  std::string try_first();
  void set_state(State state, std::string reason);
  void disable(std::string reason, std::int64_t code);

  const std::shared_ptr<Shared> shared_;
  const std::shared_ptr<Probe> probe_;
  const RunnerOptions options_;
  std::thread thread_;
  std::uint32_t finished_ = 0;  // futex word
  std::int64_t limit_ns_ = 0;   // of the thread itself

  // 0 between calls. Whoever takes it away, the thread on return or the supervisor, decides.
  std::atomic<std::int64_t> deadline_ns_ = 0;
  std::atomic<const char*> call_ = "";
  std::int64_t late_deadline_ns_ = 0;  // of the supervisor

  std::atomic<std::uint64_t> polls_ = 0;
  mutable std::mutex mutex_;  // over the status
  ProbeStatus status_;
};

void ProbeRunner::Worker::begin(const char* name) {
  call_.store(name);
  deadline_ns_.store(monotonic_ns() + limit_ns_);
}

void ProbeRunner::Worker::end() {
  if (deadline_ns_.exchange(0) == claimed) throw Abandoned{};
  if (shared_->is_stopping()) throw Abandoned{};
}

void ProbeRunner::Worker::check_deadline(std::int64_t now_ns) {
  std::int64_t deadline_ns = deadline_ns_.load();
  if (deadline_ns <= 0 || now_ns < deadline_ns) return;
  if (late_deadline_ns_ != deadline_ns) {
    late_deadline_ns_ = deadline_ns;
    return;
  }
  if (!deadline_ns_.compare_exchange_strong(deadline_ns, claimed)) return;
  disable(std::string(call_.load()) + " does not return", 0);
}

void ProbeRunner::Worker::set_state(State state, std::string reason) {
  const std::lock_guard lock(mutex_);
  status_.state = name_of(state);
  status_.reason = std::move(reason);
}

void ProbeRunner::Worker::disable(std::string reason, std::int64_t code) {
  set_state(State::disabled, reason);
  publish({FindingKind::disabled, probe_->name(), code, std::move(reason)});
}

void ProbeRunner::Worker::lack(std::string ability) {
  const std::lock_guard lock(mutex_);
  status_.missing.push_back(std::move(ability));
}

ProbeStatus ProbeRunner::Worker::status() const {
  const std::lock_guard lock(mutex_);
  ProbeStatus status = status_;
  status.polls = polls_.load();
  return status;
}

// Not for a library that the engine has loaded already: it did not crash there.
std::string ProbeRunner::Worker::try_first() {
  if (options_.trial.empty() || probe_->library().is_loaded()) return "";
  std::vector<std::string> command = options_.trial;
  command.insert(command.end(), {probe_->name(), probe_->library().name()});
  return try_in_process(command, options_.open_limit_ms * ns_per_ms, [this] { return shared_->is_stopping(); });
}

bool ProbeRunner::Worker::open() {
  set_state(State::opening, "");
  const std::string crash = try_first();
  if (shared_->is_stopping()) throw Abandoned{};
  if (!crash.empty()) throw Distrust(crash);
  limit_ns_ = options_.open_limit_ms * ns_per_ms;
  const std::string& absent = call("dlopen", [this]() -> const std::string& { return probe_->open(); });
  for (const std::string& symbol : probe_->library().missing()) lack(symbol);
  if (!absent.empty()) {
    set_state(State::absent, absent);
    return false;
  }
  probe_->prepare(*this);
  limit_ns_ = options_.call_limit_ms * ns_per_ms;
  set_state(State::polling, "");
  return true;
}

void ProbeRunner::Worker::work() {
  if (!open()) return;
  std::uint32_t epoch = load(shared_->epoch);
  while (!shared_->is_stopping()) {
    if (const std::uint32_t newest = load(shared_->epoch); newest != epoch) {
      epoch = newest;
      probe_->forget();
    }
    probe_->poll(*this);
    polls_.fetch_add(1);
    futex::wait(&shared_->stopping, 0, options_.poll_ms * ns_per_ms);
  }
  set_state(State::stopped, "");
}

void ProbeRunner::Worker::run() {
  try {
    work();
  } catch (const Abandoned&) {
    if (shared_->is_stopping() && status().state != name_of(State::disabled)) set_state(State::stopped, "");
  } catch (const Absent& error) {
    set_state(State::absent, error.what());
  } catch (const std::exception& error) {
    disable(error.what(), 0);
  } catch (...) {
    disable("threw something that is no exception of the standard", 0);
  }
  deadline_ns_.store(0);
  store(finished_, 1);
  futex::wake_all(&finished_);
}

bool ProbeRunner::Worker::join(std::int64_t end_ns) {
  if (!thread_.joinable()) return true;
  while (load(finished_) == 0) {
    const bool is_lost = deadline_ns_.load() == claimed;  // waited for long enough already
    const std::int64_t left_ns = is_lost ? 0 : end_ns - monotonic_ns();
    if (left_ns <= 0) {
      thread_.detach();
      return false;
    }
    futex::wait(&finished_, 0, left_ns);
  }
  thread_.join();
  return true;
}

void ProbeRunner::Shared::supervise(std::int64_t interval_ns) {
  while (!is_stopping()) {
    futex::wait(&stopping, 0, interval_ns);
    const std::int64_t now_ns = monotonic_ns();
    for (const std::shared_ptr<Worker>& worker : workers) worker->check_deadline(now_ns);
  }
}

ProbeRunner::ProbeRunner(std::vector<std::shared_ptr<Probe>> probes, RunnerOptions options) : options_(options) {
  if (options.poll_ms < 1 || options.poll_ms > 60'000) throw std::invalid_argument("poll_ms must be 1..60000");
  for (const auto& [name, limit_ms] :
       {std::pair{"call_limit_ms", options.call_limit_ms}, std::pair{"open_limit_ms", options.open_limit_ms}}) {
    if (limit_ms < 1 || limit_ms > 3'600'000) throw std::invalid_argument(std::string(name) + " must be 1..3600000");
  }
  shared_ = std::make_shared<Shared>();
  shared_->event_fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (shared_->event_fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd of the probes");
  for (std::shared_ptr<Probe>& probe : probes) {
    shared_->workers.push_back(std::make_shared<Worker>(shared_, std::move(probe), options));
  }
}

ProbeRunner::~ProbeRunner() {
  if (foreign()) {
    new std::shared_ptr<Shared>(std::move(shared_));  // leaked: a thread that is not here may hold its mutexes
    return;
  }
  (void)stop();
  shared_->workers.clear();  // they hold what holds them
}

bool ProbeRunner::foreign() const { return shared_->owner_pid != ::getpid(); }

int ProbeRunner::fd() const { return shared_->event_fd; }

void ProbeRunner::set_listener(std::function<void(const Finding&)> listener) {
  if (foreign()) throw std::logic_error("the probes belong to the process that made them; this is a forked child");
  if (shared_->supervisor.joinable() || shared_->is_stopping()) throw std::logic_error("the probes have been started");
  shared_->listener = std::move(listener);
}

void ProbeRunner::start() {
  if (foreign()) throw std::logic_error("the probes belong to the process that made them; this is a forked child");
  if (shared_->supervisor.joinable() || shared_->is_stopping())
    throw std::logic_error("the probes were started before");
  for (const std::shared_ptr<Worker>& worker : shared_->workers) Worker::start(worker);
  const std::int64_t shortest_ms = std::min(options_.call_limit_ms, options_.open_limit_ms);
  const std::int64_t interval_ns = std::clamp<std::int64_t>(shortest_ms / 4, 1, 250) * ns_per_ms;
  shared_->supervisor =
      start_native_thread("rt-probe-watch", [shared = shared_.get(), interval_ns] { shared->supervise(interval_ns); });
}

std::vector<std::string> ProbeRunner::stop() {
  std::vector<std::string> left_behind;
  if (foreign() || shared_->is_stopping()) return left_behind;
  store(shared_->stopping, 1);
  futex::wake_all(&shared_->stopping);
  if (shared_->supervisor.joinable()) shared_->supervisor.join();
  const std::int64_t end_ns = monotonic_ns() + options_.call_limit_ms * ns_per_ms;
  for (const std::shared_ptr<Worker>& worker : shared_->workers) {
    if (!worker->join(end_ns)) left_behind.push_back(worker->status().name);
  }
  return left_behind;
}

std::vector<Finding> ProbeRunner::take() {
  std::vector<Finding> taken;
  if (foreign()) return taken;
  const std::lock_guard lock(shared_->mutex);
  std::uint64_t count = 0;
  const ssize_t bytes = ::read(shared_->event_fd, &count, sizeof(count));
  (void)bytes;
  taken.swap(shared_->findings);
  return taken;
}

void ProbeRunner::rearm() {
  if (!foreign()) increment(shared_->epoch);
}

std::vector<ProbeStatus> ProbeRunner::status() const {
  std::vector<ProbeStatus> all;
  if (foreign()) return all;
  for (const std::shared_ptr<Worker>& worker : shared_->workers) all.push_back(worker->status());
  return all;
}

}  // namespace resilient
