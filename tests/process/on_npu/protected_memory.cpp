// A device of torch's (PrivateUse1) whose memory the host may not touch, without a device.
//
// Each allocation lies twice in the address space: where tensors point nobody may read or write (PROT_NONE), and only
// the operations of this file know the other place. A pointer to device memory that is taken for one of the host's so
// ends the process, as a driver does, and does not read by accident what is right. Operations run on the CPU, on
// copies (torch's own cpu_fallback); the backward pass runs in a thread of the autograd engine's, as on any device; and
// random numbers come from a generator of the device's.

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::Device kOnly(kDevice, 0);

struct Shadow {
  char* host;
  size_t size;
};

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) {
      return {nullptr, nullptr, &free_one, kOnly};
    }
    const size_t page = 4096;
    const size_t whole = (size + page - 1) / page * page;
    const int file = memfd_create("device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(whole)) == 0, "no memory on the device");
    void* shadow = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    void* device = mmap(nullptr, whole, PROT_NONE, MAP_SHARED, file, 0);
    close(file);
    TORCH_CHECK(shadow != MAP_FAILED && device != MAP_FAILED, "no memory on the device");
    std::memset(shadow, 0xA5, whole);
    const std::lock_guard<std::mutex> hold(lock_);
    shadows_[static_cast<char*>(device)] = {static_cast<char*>(shadow), whole};
    return {device, device, &free_one, kOnly};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_one; }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(shadow(to), shadow(from), count);
  }

  char* shadow(const void* device) const {
    if (device == nullptr) {
      return nullptr;
    }
    const std::lock_guard<std::mutex> hold(lock_);
    auto* address = const_cast<char*>(static_cast<const char*>(device));
    auto found = shadows_.upper_bound(address);
    TORCH_CHECK(found != shadows_.begin(), "not an address of the device");
    --found;
    const auto offset = static_cast<size_t>(address - found->first);
    TORCH_CHECK(offset < found->second.size, "not an address of the device");
    return found->second.host + offset;
  }

  static void free_one(void* device);

 private:
  mutable std::mutex lock_;
  std::map<char*, Shadow> shadows_;
};

Memory& memory() {
  static auto* made = new Memory;  // tensors outlive static objects
  return *made;
}

void Memory::free_one(void* device) {
  if (device == nullptr) {
    return;
  }
  Memory& all = memory();
  Shadow gone{};
  {
    const std::lock_guard<std::mutex> hold(all.lock_);
    const auto found = all.shadows_.find(static_cast<char*>(device));
    if (found == all.shadows_.end()) {
      return;
    }
    gone = found->second;
    all.shadows_.erase(found);
  }
  munmap(gone.host, gone.size);
  munmap(device, gone.size);
}

REGISTER_ALLOCATOR(kDevice, &memory());

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kOnly; }
  c10::Device getDevice() const override { return kOnly; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kOnly); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kOnly); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, kOnly); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, kOnly); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The device's random numbers: a generator of its own, with a host one inside.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator host)
      : c10::GeneratorImpl(kOnly, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host_(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override { host_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host_.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(host_.clone()); }
  at::Generator host_;
};

at::Generator& default_generator() {
  static auto* made = new at::Generator(at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator()));
  return *made;
}

at::Generator host_of(const at::Generator& generator) {
  return generator.device().type() == kDevice ? static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host_
                                              : generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kOnly; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DataPtr made = memory().allocate(size);
    const size_t kept = std::min(size, storage.nbytes());
    if (kept > 0) {
      memory().copy_data(made.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// As a tensor of the host's. It must have elements.
at::Tensor seen(const at::Tensor& tensor) {
  if (tensor.device().type() != kDevice) {
    return tensor;
  }
  return at::from_blob(
      memory().shadow(tensor.data_ptr()), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      tensor.options().device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory(), keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  if (self.numel() > 0) {
    seen(to).copy_(seen(self));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) {
    to.resize_(self.sizes());
  }
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) { return seen(self).item(); }

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(),
                                      source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return at::native::set_storage_cpu_(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &memory(), true), 0, {0},
                                      {});
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format.has_value()) {
    return self;  // keeps how it lies, as torch does
  }
  int64_t elements = 1;
  for (const auto each : size) {
    elements *= each;
  }
  const size_t wanted = (static_cast<size_t>(self.storage_offset()) + static_cast<size_t>(elements)) * self.itemsize();
  if (wanted > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), wanted);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format.has_value()) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("set_", set_nothing);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", [](at::Tensor& self, c10::Storage source) -> at::Tensor& {
    const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
    return at::native::set_storage_cpu_(self, source, 0, {elements}, {});
  });
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

void on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& arguments = operation.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type()->str().find("Generator") != std::string::npos) {
      c10::IValue& value = (*stack)[first + i];
      value = host_of(value.isNone() ? default_generator() : value.toGenerator());
    }
  }
  if (operation.schema().name() == "aten::native_dropout") {  // draws without being given a generator
    at::Generator hosts = at::detail::getDefaultCPUGenerator();
    const at::Tensor before = hosts.get_state();
    hosts.set_state(host_of(default_generator()).get_state());
    at::native::cpu_fallback(operation, stack);
    host_of(default_generator()).set_state(hosts.get_state());
    hosts.set_state(before);
    return;
  }
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY(protected_memory, library) {
  library.def("get_rng_state() -> Tensor", []() { return host_of(default_generator()).get_state(); });
  library.def("set_rng_state(Tensor state) -> ()",
              [](const at::Tensor& state) { host_of(default_generator()).set_state(state); });
  library.def("seed(int seed) -> ()",
              [](int64_t seed) { host_of(default_generator()).set_current_seed(static_cast<uint64_t>(seed)); });
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
namespace {
using namespace at::autocast;
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // the macros want that name
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

const bool kRegistered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
