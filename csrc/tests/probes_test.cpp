// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The probes against the look-alike libraries, without Python, so that the sanitizers see nothing but our code.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "fake/control.hpp"
#include "probes/acl.hpp"
#include "probes/bounded.hpp"
#include "probes/hccl.hpp"
#include "probes/nccl.hpp"
#include "probes/nvml.hpp"
#include "probes/probes.hpp"
#include "probes/runner.hpp"
#include "probes/trial.hpp"
#include "record.hpp"

using namespace resilient;

namespace {

constexpr std::int64_t ns_per_ms = 1'000'000;
const RunnerOptions quick{1, 20'000, 20'000, {}};
const RunnerOptions hasty{1, 60, 20'000, {}};
constexpr CommTable::Handle comm = 0x1234;
fake::Control* shared = nullptr;

void reset() {
  const std::uint64_t next_call = shared->next_call;
  std::memset(static_cast<void*>(shared), 0, sizeof(*shared));
  shared->magic = fake::magic;
  shared->version = fake::version;
  shared->bytes = sizeof(*shared);
  shared->next_call = next_call;
}

void map_control(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  CHECK(fd >= 0 && ::ftruncate(fd, sizeof(fake::Control)) == 0);
  void* const memory = ::mmap(nullptr, sizeof(fake::Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(memory != MAP_FAILED);
  ::close(fd);
  shared = static_cast<fake::Control*>(memory);
  reset();
  ::setenv("RESILIENT_FAKE_DEVICE", path.c_str(), 1);
}

fake::Behaviour& behaviour(fake::Function function) { return shared->behaviours[static_cast<std::size_t>(function)]; }
void set_mode(fake::Function function, fake::Mode mode) {
  store(behaviour(function).mode, static_cast<std::uint32_t>(mode));
}

std::string library(const std::string& file) { return std::string(RESILIENT_FAKE_DIR "/") + file; }

std::shared_ptr<AclProbe> make_acl() { return std::make_shared<AclProbe>(library("libascendcl.so"), 3); }

std::shared_ptr<HcclProbe> make_hccl() {
  auto probe = std::make_shared<HcclProbe>(library("libhccl.so"));
  probe->comms().add(comm);
  return probe;
}

Finding wait_finding(ProbeRunner& runner) {
  std::vector<Finding> findings;
  const bool found = eventually([&] {
    pollfd readable{runner.fd(), POLLIN, 0};
    CHECK(::poll(&readable, 1, 10'000) == 1);
    findings = runner.take();
    return !findings.empty();
  });
  CHECK(found && findings.size() == 1);
  return findings.front();
}

void let_it_poll(const ProbeRunner& runner) {
  for (std::size_t index = 0; index < runner.status().size(); ++index) {
    const std::uint64_t target = runner.status()[index].polls + 3;
    CHECK(eventually([&] { return runner.status()[index].polls >= target; }));
  }
}

void inject(std::uint8_t* address, std::size_t bytes) {
  shared->ranges[0] = {reinterpret_cast<std::uintptr_t>(address), bytes};
  store(shared->range_pid, static_cast<std::uint32_t>(::getpid()));
  store(shared->poison_pending, 1);
  store(shared->error_type, abi::acl_error_memory);
  store(shared->range_count, 1);
}

void test_memory_error() {
  reset();
  std::vector<std::uint8_t> tensor(4096, 7);
  const auto probe = make_acl();
  ProbeRunner runner({probe}, quick);
  runner.start();
  let_it_poll(runner);
  CHECK(runner.take().empty());
  inject(tensor.data() + 16, 64);
  const Finding finding = wait_finding(runner);
  CHECK(finding.kind == FindingKind::uce && finding.code == abi::acl_memory_error && finding.probe == "acl");
  const Range hit{reinterpret_cast<std::uintptr_t>(tensor.data() + 16), 64};
  CHECK(finding.ranges == std::vector<Range>{hit} && finding.time_ns > 0);
  CHECK(load(shared->poison_finished) == 1);
  CHECK(tensor[15] == 7 && tensor[16] == (7 ^ 0xA5) && tensor[79] == (7 ^ 0xA5) && tensor[80] == 7);
  let_it_poll(runner);
  CHECK(runner.take().empty());  // it is still there, and known
  runner.rearm();
  CHECK(wait_finding(runner).ranges.size() == 1);
  CHECK(run_bounded(5'000, [&] { return probe->repair_memory({{hit.first, 32}}); }) != 0);  // no such range
  CHECK(run_bounded(5'000, [&] { return probe->repair_memory({hit}); }) == 0);
  CHECK(load(shared->range_count) == 0);
  let_it_poll(runner);
  runner.rearm();
  let_it_poll(runner);
  CHECK(runner.take().empty());
  CHECK(runner.stop().empty());
}

void test_codes() {
  const std::vector<std::pair<abi::Code, FindingKind>> known{
      {107022, FindingKind::stopped}, {507053, FindingKind::uce},   {507054, FindingKind::uce},
      {507055, FindingKind::uce},     {507056, FindingKind::link},  {507057, FindingKind::hcce},
      {507904, FindingKind::hcce},    {507000, FindingKind::device}};
  reset();
  ProbeRunner runner({make_acl()}, quick);
  runner.start();
  for (const auto& [code, kind] : known) {
    store(shared->last_error, code);
    const Finding finding = wait_finding(runner);
    CHECK(finding.kind == kind && finding.code == code && finding.ranges.empty());
  }
  for (const abi::Code code : {107002, 207001, 1}) {
    store(shared->last_error, code);
    let_it_poll(runner);
    CHECK(runner.take().empty());
  }
  store(shared->last_error, 0);
  store(behaviour(fake::Function::aclrtGetMemUceInfo).result, 507054);  // the call itself says it
  CHECK(wait_finding(runner).code == 507054);
}

void test_comm_errors() {
  reset();
  const auto hccl = make_hccl();
  const auto nccl = std::make_shared<NcclProbe>(library("libnccl.so.2"));
  nccl->comms().add(comm + 1);
  ProbeRunner runner({hccl, nccl}, quick);
  runner.start();
  let_it_poll(runner);
  CHECK(runner.take().empty());
  store(shared->comm, comm);
  store(shared->comm_error, abi::hccl_retry_failed);
  const Finding first = wait_finding(runner);
  CHECK(first.kind == FindingKind::hcce && first.probe == "hccl" && first.code == 23 && first.comm == comm);
  CHECK(first.text == "collective ? error");
  CHECK(hccl->suspend(comm) == 0);
  const Finding suspended = wait_finding(runner);
  CHECK(suspended.kind == FindingKind::stopped);
  CHECK(hccl->comms().remove(comm, 10'000));
  CHECK(hccl->resume(comm) == 0 && hccl->destroy(comm) == 0);
  store(shared->comm, comm + 1);
  store(shared->comm_error, 6);
  const Finding second = wait_finding(runner);
  CHECK(second.kind == FindingKind::hcce && second.probe == "nccl" && second.comm == comm + 1);
  CHECK(nccl->comms().remove(comm + 1, 10'000) && nccl->abort(comm + 1) == 0);
  const std::uint64_t asked = behaviour(fake::Function::HcclGetCommAsyncError).count;
  let_it_poll(runner);
  CHECK(behaviour(fake::Function::HcclGetCommAsyncError).count == asked);
}

void test_nvml() {
  reset();
  shared->ecc_errors = 5;  // from before our time
  ProbeRunner runner({std::make_shared<NvmlProbe>(library("libnvidia-ml.so.1"), 0, "")}, quick);
  runner.start();
  let_it_poll(runner);
  CHECK(runner.take().empty());
  store(shared->ecc_errors, 7);
  const Finding ecc = wait_finding(runner);
  CHECK(ecc.kind == FindingKind::uce && ecc.text.starts_with("2 more"));
  store(shared->xid, 79);
  const Finding xid = wait_finding(runner);
  CHECK(xid.kind == FindingKind::device && xid.code == 79);
  store(shared->xid, 31);  // the program's own
  CHECK(eventually([] { return load(shared->xid) == 0; }));
  let_it_poll(runner);
  CHECK(runner.take().empty());
  set_mode(fake::Function::nvmlEventSetWait_v2, fake::Mode::garbage);
  CHECK(wait_finding(runner).kind == FindingKind::disabled);
}

std::string disabled_reason(ProbeRunner& runner) {
  runner.start();
  const Finding finding = wait_finding(runner);
  CHECK(finding.kind == FindingKind::disabled);
  CHECK(runner.status()[0].state == "disabled" && runner.status()[0].reason == finding.text);
  return finding.text;
}

void test_garbage() {
  struct Case {
    fake::Function function;
    fake::Mode mode;
    const char* reason;
  };
  for (const Case& each : {Case{fake::Function::aclrtPeekAtLastError, fake::Mode::garbage, "gave -1"},
                           Case{fake::Function::aclrtGetMemUceInfo, fake::Mode::garbage, "1000000007 ranges"},
                           Case{fake::Function::aclrtGetMemUceInfo, fake::Mode::overrun, "behind the memory"}}) {
    reset();
    set_mode(each.function, each.mode);
    ProbeRunner runner({make_acl()}, quick);
    CHECK(disabled_reason(runner).find(each.reason) != std::string::npos);
  }
  reset();
  inject(nullptr, 16);
  store(shared->poison_pending, 0);
  ProbeRunner impossible({make_acl()}, quick);
  CHECK(disabled_reason(impossible).find("impossible") != std::string::npos);
  reset();
  set_mode(fake::Function::HcclGetCommAsyncError, fake::Mode::garbage);
  ProbeRunner comms({make_hccl()}, quick);
  CHECK(disabled_reason(comms).find("reported -559038737") != std::string::npos);
}

// The error itself must get through, though its text cannot be had.
void test_hostile_texts() {
  for (const std::int32_t result : {0, 1}) {  // a null pointer, a text without an end
    reset();
    set_mode(fake::Function::HcclGetErrorString, fake::Mode::garbage);
    behaviour(fake::Function::HcclGetErrorString).result = result;
    shared->comm_error = 9;
    ProbeRunner runner({make_hccl()}, quick);
    runner.start();
    std::vector<Finding> findings;
    CHECK(eventually([&] {
      for (Finding& each : runner.take()) findings.push_back(std::move(each));
      return findings.size() == 2;
    }));
    CHECK(findings[0].kind == FindingKind::hcce && findings[1].kind == FindingKind::disabled);
  }
  std::string copy;
  CHECK(!read_text(nullptr, copy) && !read_text(reinterpret_cast<const char*>(8), copy));
  CHECK(read_text("short", copy) && copy == "short");
}

void test_never_returns() {
  reset();
  const auto probe = make_hccl();
  ProbeRunner runner({probe, make_acl()}, hasty);
  runner.start();
  let_it_poll(runner);
  set_mode(fake::Function::HcclGetCommAsyncError, fake::Mode::hang);
  const std::int64_t begin_ns = monotonic_ns();
  const Finding finding = wait_finding(runner);
  CHECK(monotonic_ns() - begin_ns >= 60 * ns_per_ms);
  CHECK(finding.kind == FindingKind::disabled && finding.text == "HcclGetCommAsyncError does not return");
  CHECK(!probe->comms().remove(comm, 10));  // somebody is inside
  set_mode(fake::Function::HcclCommSuspend, fake::Mode::hang);
  check_throws<std::system_error>([&] { (void)run_bounded(10, [probe] { return probe->suspend(comm); }); });
  const std::int64_t stop_ns = monotonic_ns();
  CHECK(runner.stop() == std::vector<std::string>{"hccl"});
  CHECK(monotonic_ns() - stop_ns < 5'000 * ns_per_ms);
  // Let them out, so that the sanitizers can say that nothing was freed under them.
  reset();
  CHECK(eventually([&] { return probe->comms().remove(comm, 0); }));
}

void test_absent_and_missing() {
  reset();
  ProbeRunner runner({std::make_shared<HcclProbe>("libresilient_no_such.so"), std::make_shared<NcclProbe>("libm.so.6"),
                      std::make_shared<AclProbe>(library("libascendcl_old.so"), 0)},
                     quick);
  runner.start();
  CHECK(eventually([&] { return runner.status()[2].polls > 2 && runner.status()[1].state == "absent"; }));
  CHECK(eventually([&] { return runner.status()[0].state == "absent"; }));
  CHECK(runner.status()[0].reason.find("libresilient_no_such.so") != std::string::npos);
  CHECK(runner.status()[1].reason.find("none of the symbols") != std::string::npos);
  CHECK(runner.status()[2].missing.size() == 3 && runner.status()[2].state == "polling");
  CHECK(runner.take().empty());
  AclProbe old(library("libascendcl_old.so"), 0);
  check_throws<std::runtime_error>([&] { (void)old.repair_memory({{8, 8}}); });
}

// A library that nobody has loaded is tried in another process first; a copy of the file is such a library each time.
void test_trial(const std::string& folder) {
  RunnerOptions tried = quick;
  tried.trial = {"/proc/self/exe", "--trial"};
  int copies = 0;
  const auto copy = [&] {
    const std::string path = folder + "/libascendcl" + std::to_string(copies++) + ".so";
    std::filesystem::copy_file(library("libascendcl.so"), path);
    return path;
  };
  reset();
  ProbeRunner fine({std::make_shared<AclProbe>(copy(), 0)}, tried);
  fine.start();
  let_it_poll(fine);
  CHECK(fine.take().empty());
  CHECK(fine.stop().empty());  // it is past its trial: a crash now would take us down
  set_mode(fake::Function::aclrtPeekAtLastError, fake::Mode::crash);
  ProbeRunner crashing({std::make_shared<AclProbe>(copy(), 0)}, tried);
  CHECK(disabled_reason(crashing).starts_with("the trial call ended"));
  reset();
  set_mode(fake::Function::aclrtPeekAtLastError, fake::Mode::hang);
  tried.open_limit_ms = 50;
  ProbeRunner hanging({std::make_shared<AclProbe>(copy(), 0)}, tried);
  CHECK(disabled_reason(hanging) == "the trial call did not return");
  reset();
}

// The probe beside it may be loading its library, or Python a module: a fork would find the loader locked for ever.
void test_trial_beside_loading() {
  std::atomic<bool> over = false;
  std::thread loading([&] {
    while (!over) ::dlclose(::dlopen(library("libnccl.so.2").c_str(), RTLD_NOW));
  });
  const std::vector<std::string> command{"/proc/self/exe", "--trial", "acl", library("libascendcl.so")};
  for (int round = 0; round < 20; ++round) {
    CHECK(try_in_process(command, 20'000 * ns_per_ms, [] { return false; }).empty());
  }
  CHECK(try_in_process({"/nowhere/python"}, 20'000 * ns_per_ms, [] { return false; }).empty());
  over = true;
  loading.join();
}

void test_fork() {
  reset();
  auto* const runner = new ProbeRunner({make_acl()}, quick);
  runner->start();
  let_it_poll(*runner);
  store(shared->last_error, 507053);
  CHECK(wait_finding(*runner).kind == FindingKind::uce);
  const pid_t child = ::fork();
  if (child == 0) {
    CHECK(runner->take().empty() && runner->status().empty() && runner->stop().empty());
    runner->rearm();
    check_throws<std::logic_error>([&] { runner->start(); });
    delete runner;
    std::_Exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  let_it_poll(*runner);
  delete runner;
}

void test_many_clean_polls() {
  reset();
  std::vector<std::shared_ptr<Probe>> probes{make_acl(), make_hccl(),
                                             std::make_shared<NcclProbe>(library("libnccl.so.2")),
                                             std::make_shared<NvmlProbe>(library("libnvidia-ml.so.1"), 0, "GPU-1")};
  ProbeRunner runner(probes, quick);
  runner.start();
  CHECK(eventually([&] {
    const auto all = runner.status();
    return std::all_of(all.begin(), all.end(), [](const ProbeStatus& each) { return each.polls >= 300; });
  }));
  CHECK(runner.take().empty());
  CHECK(runner.stop().empty());
  CHECK(runner.stop().empty());
  check_throws<std::logic_error>([&] { runner.start(); });
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 4 && std::string(arguments[1]) == "--trial") run_trial(*make_probe(arguments[2], arguments[3], 0, ""));
  std::string folder = (std::filesystem::temp_directory_path() / "probes_test.XXXXXX").string();
  CHECK(::mkdtemp(folder.data()) != nullptr);
  map_control(folder + "/device");
  test_trial(folder);
  test_trial_beside_loading();
  test_memory_error();
  test_codes();
  test_comm_errors();
  test_nvml();
  test_garbage();
  test_hostile_texts();
  test_never_returns();
  test_absent_and_missing();
  test_fork();
  test_many_clean_polls();
  std::filesystem::remove_all(folder);
  std::puts("probes_test: all passed");
  return 0;
}
