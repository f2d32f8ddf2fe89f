// A simulated accelerator: streams that run late, memory that the host cannot touch, a caching allocator that poisons
// what is freed, and vector clocks that find accesses without an order. device.cpp has the hardware, kernels.cpp what
// torch calls.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace simulated {

constexpr int kDevices = 2;
constexpr int kStreams = 16; // a device; the first is the default one, the others are handed out in turn

enum Counter {
  kKernels,
  kToDevice,
  kToHost,
  kOnDevice,
  kToDeviceBytes,
  kToHostBytes,
  kPageableNonBlocking, // copies that were asked not to block, between the device and memory that is not page-locked
  kBlockingCopies,      // copies and reads of values that the host waited for
  kDeviceWaits,         // of the host for all streams
  kStreamWaits,
  kEventWaits,
  kEventQueries,
  kAllocations,        // of tensors
  kSegmentAllocations, // of the allocator, from the device
  kSegmentFrees,
  kPinnedBytes, // now
  kCounters
};
extern std::array<std::atomic<uint64_t>, kCounters> counters;

/// How far each stream has come, as somebody knows it.
using Clock = std::array<uint64_t, kDevices * kStreams>;

struct Access {
  const void* start;
  size_t bytes;
  bool is_write;
};

struct Event {
  int stream = -1; // -1: not recorded yet
  uint64_t task = 0;
  Clock clock{};
  double virtual_s = 0;
  std::shared_ptr<double> passed_s; // when the stream came to it, on the machine's clock; none: nobody asks
};

/// Raises in the child of a fork.
void require_usable();

int current_device();
/// Index over all devices of the stream that is current for this thread.
int current_stream(int device);

/// Queues `run` on a stream, which does it when it is asked for or after a random delay. Notes and checks accesses.
void launch(int stream, const char* name, const std::vector<Access>& accesses, std::function<void()> run);
/// The host waits for all that is queued on a stream, and knows it. Args: counter: what to count it as.
void wait_for_stream(int stream, Counter counter);
/// Lets a stream run what is queued; nobody knows it, so no order comes of it.
void hurry(int stream);

/// Where kernels see what the host knows by `address`.
void* inside(const void* address);
bool is_on_device(const void* address);

void* allocate(int device, size_t bytes);
void free_memory(void* address);
c10::DeviceAllocator* allocator();

c10::Allocator* pinned_allocator();
/// Whether all of it is page-locked.
bool is_pinned(const void* address, size_t bytes);
/// Memory of the pinned allocator is not reused before what is queued on `stream` has run.
void used_by(const void* address, int stream);

} // namespace simulated
