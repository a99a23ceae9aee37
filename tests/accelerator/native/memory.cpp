// Memory of devices, poisoned when it is taken and when it is freed, and pinned memory of the host, poisoned when it
// is taken.

#include "runtime.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace simulated {

namespace {

constexpr size_t kAlignment = 4096;
constexpr size_t kMostBuriedBytes = size_t{256} << 20;

void add(std::atomic<int64_t>& bytes, std::atomic<int64_t>& peak, int64_t more) {
  const int64_t now = bytes += more;
  int64_t before = peak;
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
}

void* aligned(size_t nbytes) {
  void* address = nullptr;
  if (posix_memalign(&address, kAlignment, nbytes) != 0) throw std::bad_alloc();
  return address;
}

// Freed memory stays poisoned for a while before the host may use it for something else.
void bury(void* address, size_t nbytes) {
  static auto& mutex = *new std::mutex;
  static auto& buried = *new std::deque<std::pair<void*, size_t>>;
  static size_t total = 0;

  std::memset(address, kFreed, nbytes);
  std::lock_guard<std::mutex> lock(mutex);
  buried.emplace_back(address, nbytes);
  total += nbytes;
  while (total > kMostBuriedBytes) {
    std::free(buried.front().first);
    total -= buried.front().second;
    buried.pop_front();
  }
}

// Memory of a device. It is freed in the order of the stream that was current when it was taken, whatever other
// streams do with it: one that has not waited, and that nobody has told of by `record_use`, reads poison.
struct Block {
  void* address;
  size_t nbytes;
  c10::Stream stream;
  std::vector<c10::Stream> users;
};

void free_block(void* context) {
  if (context == nullptr) return;
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  counters.device_bytes -= static_cast<int64_t>(block->nbytes);
  if (is_in_bad_fork()) return;
  auto streams_left = std::make_shared<std::atomic<size_t>>(block->users.size() + 1);
  const auto arrive = [streams_left, address = block->address, nbytes = block->nbytes] {
    if (--*streams_left == 0) bury(address, nbytes);
  };
  for (const auto& user : block->users) tasks_of(user).push(arrive);
  tasks_of(block->stream).push(arrive);
}

struct Device_allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const int index = current_device();
    const c10::Device device(kDevice, static_cast<c10::DeviceIndex>(index));
    if (nbytes == 0) return {nullptr, nullptr, &free_block, device};
    current_tasks(index);  // from here on the device is in use
    const int64_t free = settings.memory_bytes - counters.device_bytes;
    TORCH_CHECK_WITH(
        OutOfMemoryError, static_cast<int64_t>(nbytes) <= free,
        "NPU out of memory. Tried to allocate ", nbytes, " bytes, of which ", free, " are free.");
    void* address = aligned(nbytes);
    std::memset(address, kTaken, nbytes);
    auto* block = new Block{address, nbytes, current_stream(index), {}};
    add(counters.device_bytes, counters.device_peak, static_cast<int64_t>(nbytes));
    return {block->address, block, &free_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

std::mutex& pinned_mutex = *new std::mutex;
std::map<uintptr_t, size_t>& pinned = *new std::map<uintptr_t, size_t>;

void free_pinned(void* address) {
  if (address == nullptr) return;
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto found = pinned.find(reinterpret_cast<uintptr_t>(address));
  counters.pinned_bytes -= static_cast<int64_t>(found->second);
  pinned.erase(found);
  std::free(address);
}

// As torch's CachingHostAllocator, it takes blocks of powers of two. Unlike it, it keeps none.
struct Pinned_allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_pinned, c10::kCPU};
    size_t rounded = 1;
    while (rounded < nbytes) rounded *= 2;
    void* address = aligned(nbytes);
    std::memset(address, kTaken, nbytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[reinterpret_cast<uintptr_t>(address)] = rounded;
    add(counters.pinned_bytes, counters.pinned_peak, static_cast<int64_t>(rounded));
    return {address, address, &free_pinned, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto& allocator = *new Device_allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static auto& allocator = *new Pinned_allocator;
  return &allocator;
}

bool is_pinned(const void* address) {
  const auto place = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto after = pinned.upper_bound(place);
  return after != pinned.begin() && place < std::prev(after)->first + std::prev(after)->second;
}

void record_use(const c10::DataPtr& memory, const c10::Stream& stream) {
  auto* block = static_cast<Block*>(memory.get_context());
  if (block != nullptr && stream != block->stream) block->users.push_back(stream);
}

}  // namespace simulated
