// Registers a CUDA device without memory, kernels or driver with torch's CPU build.
// Autograd, autocast and FSDP2 ask for a device guard and for the hooks; the tensors themselves are fake.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr int kDevices = 8;
thread_local c10::DeviceIndex chosen_device = 0;

c10::DeviceIndex change_device(c10::DeviceIndex index) {
  const c10::DeviceIndex previous = chosen_device;
  if (index >= 0) {
    chosen_device = index;
  }
  return previous;
}

c10::Device device_of(c10::DeviceIndex index) {
  return c10::Device(c10::DeviceType::CUDA, index < 0 ? chosen_device : index);
}

struct FakeGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return device_of(change_device(device.index())); }
  c10::Device getDevice() const override { return device_of(chosen_device); }
  void setDevice(c10::Device device) const override { change_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { change_device(device.index()); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_of(device.index()));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

// torch looks for hooks of this name.
struct CUDAHooks : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return chosen_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { change_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return change_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return change_device(device); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace
