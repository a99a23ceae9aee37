// What torch asks of an accelerator: the guard of devices and streams, generators, and hooks.

#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "backend.h"

namespace simulated {

namespace {

int index_of(c10::DeviceIndex index) {
  return index < 0 ? current_device() : index;
}

c10::Device device_at(int index) {
  return {kDevice, static_cast<c10::DeviceIndex>(index)};
}

// The numbers of the CPU's generator, so that what is drawn can be compared.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int index) {
    device_ = device_at(index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

// An event is a task of a stream.
struct Event {
  Task_queue* tasks;
  uint64_t number;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Device getDevice() const override {
    return device_at(current_device());
  }

  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < settings.devices) set_current_device(device.index());
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings.devices);
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device.index()));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_at(index_of(device.index())));
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(index_of(device.index()));
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(index_of(device.index()));
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }

  bool queryStream(const c10::Stream& stream) const override {
    auto& tasks = tasks_of(stream);
    return tasks.is_done(tasks.last());
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    ++counters.host_waits;
    wait_for_stream(stream);
  }

  void synchronizeDevice(c10::DeviceIndex index) const override {
    ++counters.host_waits;
    wait_for_device(index_of(index));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    auto& tasks = tasks_of(stream);
    if (*event == nullptr) *event = new Event{};
    *static_cast<Event*>(*event) = {&tasks, tasks.last()};
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const auto awaited = *static_cast<Event*>(event);
    auto& tasks = tasks_of(stream);
    if (&tasks != awaited.tasks) tasks.push([awaited] { awaited.tasks->wait(awaited.number); });
  }

  bool queryEvent(void* event) const override {
    const auto* recorded = static_cast<Event*>(event);
    return recorded == nullptr || recorded->tasks->is_done(recorded->number);
  }

  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    ++counters.host_waits;
    const auto* recorded = static_cast<Event*>(event);
    recorded->tasks->wait(recorded->number);
    recorded->tasks->throw_error();
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_use(memory, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return settings.devices > 0;
  }

  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return is_initialized();
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index_of(index));
  }

  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index_of(index));
  }

  at::Device getDeviceFromPtr(void*) const override {
    return device_at(current_device());
  }

  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }

  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(settings.devices);
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }

  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device(index);
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    set_current_device(index);
    return before;
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    if (index >= 0) set_current_device(index);
    return before;
  }

  // FSDP2 resizes the storages of gathered parameters to nothing and back. What was in them is kept where both
  // sizes have room for it, in the order of the current stream.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* memory = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(memory->device());
    auto fresh = device_allocator()->allocate(nbytes);
    const size_t kept = std::min(memory->nbytes(), nbytes);
    if (kept > 0) {
      wait_for_stream(current_stream(current_device()));
      std::memcpy(fresh.get(), memory->data(), kept);
    }
    memory->set_data_ptr(std::move(fresh));
    memory->set_nbytes(nbytes);
  }
};

const int registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kDevice, device_allocator());
  return 0;
}();

}  // namespace

const at::Generator& default_generator(int device) {
  static const auto& generators = *[] {
    auto* all = new std::vector<at::Generator>;
    for (int index = 0; index < kMostDevices; ++index) all->push_back(at::make_generator<Generator>(index));
    return all;
  }();
  return generators.at(device);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace simulated
