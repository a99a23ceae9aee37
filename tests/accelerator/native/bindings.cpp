// What the Python module `tests.accelerator.simulated` calls.

#include "backend.h"
#include "collectives.h"
#include "runtime.h"

#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <map>
#include <string>

namespace simulated {

namespace {

std::map<std::string, int64_t> read_counters() {
  return {
      {"host_waits", counters.host_waits},
      {"kernels", counters.kernels},
      {"collectives", counters.collectives},
      {"async_copies", counters.async_copies},
      {"pageable_to_device", counters.pageable_to_device},
      {"pageable_to_host", counters.pageable_to_host},
      {"pinned_to_device", counters.pinned_to_device},
      {"pinned_to_host", counters.pinned_to_host},
      {"pinned_bytes", counters.pinned_bytes},
      {"pinned_peak", counters.pinned_peak},
      {"device_bytes", counters.device_bytes},
      {"device_peak", counters.device_peak},
  };
}

void reset_peaks() {
  counters.pinned_peak = counters.pinned_bytes.load();
  counters.device_peak = counters.device_bytes.load();
}

void set_devices(int count) {
  TORCH_CHECK(count >= 0 && count <= kMostDevices, "at most ", kMostDevices, " devices");
  settings.devices = count;
}

// As `torch.cuda.set_device`, it begins to use the device.
void set_device(int device) {
  set_current_device(device);
  current_tasks(device);
}

void synchronize(int device) {
  ++counters.host_waits;
  wait_for_device(device);
}

// Keeps the current stream busy, as `torch.cuda._sleep`.
void sleep_on_stream(int microseconds) {
  current_tasks(current_device()).push([microseconds] { usleep(microseconds); });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  // Whoever waits for a stream lets other threads of Python go on, which may be what the stream waits for.
  const pybind11::call_guard<pybind11::gil_scoped_release> without_gil;
  module.def("counters", &read_counters);
  module.def("reset_peaks", &reset_peaks);
  module.def("set_delay", [](int microseconds) { settings.delay_us = microseconds; });
  module.def("set_upload_delay", [](int microseconds) { settings.upload_delay_us = microseconds; });
  module.def("set_devices", &set_devices);
  module.def("set_memory", [](int64_t nbytes) { settings.memory_bytes = nbytes; });
  module.def("memory", [] { return settings.memory_bytes.load(); });
  module.def("device_count", [] { return settings.devices.load(); });
  module.def("current_device", &current_device);
  module.def("set_device", &set_device);
  module.def("is_initialized", &is_initialized);
  module.def("is_in_bad_fork", &is_in_bad_fork);
  module.def("synchronize", &synchronize, without_gil);
  module.def("sleep_on_stream", &sleep_on_stream);
  module.def("pause_stream", [](int device) { current_tasks(device).set_paused(true); });
  module.def("resume_stream", [](int device) { current_tasks(device).set_paused(false); });
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("make_backend", &make_backend);
}

}  // namespace simulated
