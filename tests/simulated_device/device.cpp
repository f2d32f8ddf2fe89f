#include "device.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

namespace simulated {

std::array<std::atomic<uint64_t>, kCounters> counters{};

namespace {

std::atomic<bool> is_child{false};
std::atomic<uint64_t> longest_delay_us{20000};
std::atomic<uint64_t> seed{0};
std::atomic<double> slow_bytes_per_s{0}; // of copies, on the machine's clock; 0: they take what they take

double machine_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Streams.

class Queue {
 public:
  uint64_t push(std::function<void()> run) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { work(); }).detach();
    }
    tasks_.push_back(std::move(run));
    ++queued_;
    changed_.notify_all();
    return queued_;
  }

  uint64_t queued() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queued_;
  }

  bool has_done(uint64_t task) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= task;
  }

  /// Notes when the tasks up to this one are done.
  void note(uint64_t task, std::shared_ptr<double> at) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_ >= task)
      *at = machine_s();
    else
      noted_.emplace_back(task, std::move(at));
  }

  void finish(uint64_t task) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (done_ >= task)
      return;
    wanted_ = std::max(wanted_, task);
    changed_.notify_all();
    changed_.wait(lock, [&] { return done_ >= task; });
  }

 private:
  void work() {
    std::minstd_rand random(static_cast<unsigned>(seed.load() * 7919 + reinterpret_cast<uintptr_t>(this) / 64 + 1));
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      // Early, late, or when somebody waits for it.
      uint64_t longest = longest_delay_us.load();
      auto delay = std::chrono::microseconds(random() % 4 == 0 || longest == 0 ? 0 : random() % longest);
      if (wanted_ <= done_)
        changed_.wait_for(lock, delay, [&] { return wanted_ > done_; });
      auto run = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      run();
      run = nullptr;
      lock.lock();
      ++done_;
      for (; !noted_.empty() && noted_.front().first <= done_; noted_.pop_front())
        *noted_.front().second = machine_s();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::deque<std::pair<uint64_t, std::shared_ptr<double>>> noted_;
  uint64_t queued_ = 0, done_ = 0, wanted_ = 0;
  bool started_ = false;
};

// Never destroyed: threads of streams run until the process ends.
auto& queues = *new std::array<Queue, kDevices * kStreams>;

// What fails, and what it costs where nobody meant it.

std::atomic<uint64_t> contexts{0};          // a bit a device that has one: half a GiB of a real one's memory
std::atomic<bool> has_failed{false};        // every call raises, as after an assertion in a kernel
thread_local int last_error = 0;            // of a call that returned it; the next launch raises it and forgets it

thread_local int device_now = 0;

/// A call of the driver that is for the thread's current device, or for `device`.
void use(int device) { contexts |= uint64_t(1) << device; }

void require_works() {
  if (has_failed) // 710: cudaErrorAssert
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "simulated accelerator: device-side assert triggered\nno call works");
}

thread_local std::array<int, kDevices> stream_now{};
std::array<std::atomic<int>, kDevices> handed_out{};

int stream_index(const c10::Stream& stream) {
  return stream.device_index() * kStreams + static_cast<int>(stream.id());
}

// Orders. One mutex for clocks and allocators: what is queued has one order.

auto& mutex = *new std::recursive_mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

std::array<Clock, kDevices * kStreams> clocks{};
Clock host_clock{}; // what the host has waited for; one for all of its threads, whose own order is not known here
auto& races = *new std::vector<std::string>;

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i)
    clock[i] = std::max(clock[i], other[i]);
}

struct Use {
  int stream = -1;
  uint64_t at = 0;
  const char* name = "";
};

struct Range {
  uintptr_t end;
  Use written;
  std::vector<Use> reads;
};
auto& ranges = *new std::map<uintptr_t, Range>;

void cut(uintptr_t at) {
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin())
    return;
  auto found = std::prev(next);
  if (found->first == at || found->second.end <= at)
    return;
  Range rest = found->second;
  found->second.end = at;
  ranges.emplace(at, std::move(rest));
}

void forget(uintptr_t start, uintptr_t end) {
  cut(start);
  cut(end);
  ranges.erase(ranges.lower_bound(start), ranges.lower_bound(end));
}

void require_order(const Use& earlier, const char* how, int stream, const char* name, bool is_write, const void* where) {
  if (earlier.stream < 0 || earlier.stream == stream || clocks[stream][earlier.stream] >= earlier.at)
    return;
  if (races.size() >= 100)
    return;
  std::ostringstream text;
  text << name << " on stream " << stream << (is_write ? " writes" : " reads") << " what " << earlier.name
       << " on stream " << earlier.stream << " " << how << ", and has not waited for it (" << where << ")";
  races.push_back(text.str());
}

void note(const Access& access, int stream, const char* name) {
  auto start = reinterpret_cast<uintptr_t>(access.start), end = start + access.bytes;
  if (start == end)
    return;
  cut(start);
  cut(end);
  const Use use{stream, clocks[stream][stream], name};
  for (uintptr_t at = start; at < end;) {
    auto found = ranges.lower_bound(at);
    if (found == ranges.end() || found->first > at) { // nobody has been here
      uintptr_t stop = found == ranges.end() ? end : std::min(end, found->first);
      found = ranges.emplace(at, Range{stop, {}, {}}).first;
    }
    Range& range = found->second;
    require_order(range.written, "writes", stream, name, access.is_write, access.start);
    if (access.is_write) {
      for (const Use& read : range.reads)
        require_order(read, "reads", stream, name, true, access.start);
    } else {
      auto own = std::find_if(range.reads.begin(), range.reads.end(), [&](const Use& r) { return r.stream == stream; });
      if (own == range.reads.end())
        range.reads.push_back(use);
      else
        *own = use;
    }
    at = range.end;
  }
  if (access.is_write) {
    forget(start, end);
    ranges.emplace(start, Range{end, use, {}});
  }
}

// Virtual time: what a step would take if copies, matrix products and calls of the host took this long, and nothing else
// anything.

struct Span {
  int stream;
  std::string name;
  double start, end;
};
double bytes_per_s = 0, product_s = 0; // 0: there is no virtual time
double exchanged_bytes_per_s = 0;      // of copies that stand for what travels between devices
double launch_s = 0, event_s = 0, wake_s = 0; // of the host
std::array<double, kDevices * kStreams> stream_s{};
std::array<double, 8> host_s{}; // of the threads that count as one
thread_local int host_now = 0;
thread_local bool is_host = true; // false: the thread stands for hardware: the host does not know what it waited for
auto& spans = *new std::vector<Span>;

double duration(const std::string& name, const std::vector<Access>& accesses) {
  if (bytes_per_s == 0)
    return 0;
  if (name == "copy to device" || name == "copy to host")
    return static_cast<double>(accesses.back().bytes) / (is_host ? bytes_per_s : exchanged_bytes_per_s);
  return name == "aten::addmm" || name == "aten::mm" || name == "aten::_grouped_mm" ? product_s : 0;
}

void host_spends(double s) {
  if (is_host)
    host_s[host_now] += s;
}

/// The host waits until `s`, unless it is later already.
void host_waits(double s) {
  double& now = host_s[host_now];
  if (now >= s)
    return;
  if (is_host)
    spans.push_back({-1 - host_now, "wait", now, s});
  now = s + (is_host ? wake_s : 0);
}

void spend(int stream, const char* name, const std::vector<Access>& accesses) {
  if (std::strcmp(name, "free") == 0)
    return; // the allocator's books: a device does nothing
  host_spends(launch_s);
  double lasts = duration(name, accesses), start = std::max(stream_s[stream], host_s[host_now]);
  stream_s[stream] = start + lasts;
  if (lasts > 0)
    spans.push_back({stream, name, start, start + lasts});
}

// Events.

void record(Event& event, int stream) {
  Lock lock(mutex);
  event.stream = stream;
  event.virtual_s = stream_s[stream];
  event.task = queues[stream].queued();
  event.clock = clocks[stream];
}

void make_wait(int stream, const Event& event) {
  if (event.stream < 0 || event.stream == stream)
    return;
  Lock lock(mutex);
  join(clocks[stream], event.clock);
  stream_s[stream] = std::max(stream_s[stream], event.virtual_s);
  queues[stream].push([from = event.stream, task = event.task] { queues[from].finish(task); });
}

/// The host calls the driver to record an event, to ask for it, or to make a stream wait for it.
void calls_event() {
  Lock lock(mutex);
  host_spends(event_s);
}

void host_knows(const Event& event) {
  Lock lock(mutex);
  if (is_host)
    join(host_clock, event.clock);
  host_waits(event.virtual_s);
}

void wait_for_device(int device) {
  ++counters[kDeviceWaits];
  for (int stream = device * kStreams; stream < (device + 1) * kStreams; ++stream) {
    Event event;
    record(event, stream);
    queues[stream].finish(event.task);
    host_knows(event);
  }
}

// Memory. Mapped twice: tensors have addresses that nobody may read, kernels use the others.

constexpr size_t kCapacity = size_t(16) << 30; // addresses a device
constexpr size_t kMiB = size_t(1) << 20;
constexpr size_t kAlignment = 512;

struct Mapping {
  char* outside = nullptr;
  char* inside = nullptr;
  int file = -1;

  Mapping() {
    file = memfd_create("simulated-accelerator", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kDevices * kCapacity) == 0, "no memory file for the simulated accelerator");
    outside = map(PROT_NONE);
    inside = map(PROT_READ | PROT_WRITE);
  }

  char* map(int rights) {
    void* found = mmap(nullptr, kDevices * kCapacity, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(found != MAP_FAILED, "no addresses for the simulated accelerator");
    madvise(found, kDevices * kCapacity, MADV_DONTDUMP);
    return static_cast<char*>(found);
  }
};
Mapping& mapping() {
  static Mapping& found = *new Mapping;
  return found;
}

struct Block {
  char* start;
  size_t bytes;
  int stream; // whose pool it is in
  bool is_small;
  bool is_allocated = false;
  Block* before = nullptr; // in the same segment
  Block* after = nullptr;
  std::set<int> others{}; // streams that use it, as record_stream says
};

struct Smaller {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->bytes, a->start) < std::tie(b->bytes, b->start);
  }
};

void poison(char* start, size_t bytes) { std::memset(inside(start), 0xff, bytes); } // NaN, in every format

/// What torch's caching allocators do: a pool a stream, segments that are cut and joined, frees in stream order.
class Memory {
 public:
  int device = 0;
  size_t limit = size_t(1) << 30;
  c10::CachingDeviceAllocator::DeviceStats stats;

  int fails_in = 0; // that many allocations; 0: none

  void* allocate(size_t asked, int stream) {
    size_t bytes = (asked + kAlignment - 1) / kAlignment * kAlignment;
    bool is_small = bytes <= kMiB, fails = fails_in > 0 && --fails_in == 0;
    take_back(fails);
    Block* block = fails ? nullptr : find(bytes, stream, is_small);
    if (block == nullptr && !fails)
      block = add_segment(bytes, stream, is_small);
    if (block == nullptr && !fails) { // as torch does: wait for other streams, give back what is free, try again
      take_back(true);
      block = find(bytes, stream, is_small);
    }
    if (block == nullptr && !fails) {
      release_segments();
      block = add_segment(bytes, stream, is_small);
    }
    if (block == nullptr) {
      ++stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "simulated accelerator out of memory: tried to allocate ", asked, " bytes on device ",
          device, ", of ", limit, " are ", limit - reserved(), " not reserved and ", reserved() - allocated(),
          " reserved but not allocated");
    }
    divide(block, bytes);
    block->is_allocated = true;
    blocks_[block->start] = block;
    count(stats.allocated_bytes, block->bytes, true);
    count(stats.allocation, 1, true);
    ++counters[kAllocations];
    return block->start;
  }

  void free_block(void* start) {
    auto found = blocks_.find(static_cast<char*>(start));
    if (found == blocks_.end())
      return;
    Block* block = found->second;
    blocks_.erase(found);
    count(stats.allocated_bytes, block->bytes, false);
    count(stats.allocation, 1, false);
    if (block->others.empty()) {
      to_pool(block);
      return;
    }
    std::vector<Event> events;
    for (int stream : block->others) {
      events.emplace_back();
      record(events.back(), stream);
    }
    block->others.clear();
    waiting_.emplace_back(block, std::move(events));
  }

  void record_use(void* start, int stream) {
    auto found = blocks_.find(static_cast<char*>(start));
    if (found != blocks_.end() && stream != found->second->stream)
      found->second->others.insert(stream);
  }

  void empty_cache() {
    take_back(true);
    release_segments();
  }

  size_t reserved() const { return stats.reserved_bytes[0].current; }
  size_t allocated() const { return stats.allocated_bytes[0].current; }

 private:
  static void count(c10::CachingAllocator::StatArray& stat, size_t amount, bool is_more) {
    if (is_more)
      stat[0].increase(amount);
    else
      stat[0].decrease(amount);
  }

  Block* find(size_t bytes, int stream, bool is_small) {
    Block key{nullptr, bytes, stream, is_small};
    auto& pool = pools_[{stream, is_small}];
    auto found = pool.lower_bound(&key);
    if (found == pool.end())
      return nullptr;
    Block* block = *found;
    pool.erase(found);
    return block;
  }

  Block* add_segment(size_t bytes, int stream, bool is_small) {
    size_t size = is_small ? 2 * kMiB : bytes < 10 * kMiB ? 20 * kMiB : (bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
    if (reserved() + size > limit || size > kCapacity)
      return nullptr;
    if (addresses_.empty() && segments_.empty())
      addresses_[device * kCapacity] = kCapacity;
    for (auto& [start, free] : addresses_) {
      if (free < size)
        continue;
      size_t at = start, rest = free - size;
      addresses_.erase(at);
      if (rest)
        addresses_[at + size] = rest;
      char* outside = mapping().outside + at;
      poison(outside, size);
      segments_[outside] = size;
      count(stats.reserved_bytes, size, true);
      count(stats.segment, 1, true);
      ++stats.num_device_alloc;
      ++counters[kSegmentAllocations];
      return new Block{outside, size, stream, is_small};
    }
    return nullptr;
  }

  void divide(Block* block, size_t bytes) {
    size_t rest = block->bytes - bytes;
    if (rest < kAlignment || (!block->is_small && rest <= kMiB))
      return;
    auto* other = new Block{block->start + bytes, rest, block->stream, block->is_small};
    other->before = block;
    other->after = block->after;
    if (block->after)
      block->after->before = other;
    block->after = other;
    block->bytes = bytes;
    pools_[{other->stream, other->is_small}].insert(other);
  }

  void to_pool(Block* block) {
    block->is_allocated = false;
    launch(block->stream, "free", {{block->start, block->bytes, true}},
           [start = block->start, bytes = block->bytes] { poison(start, bytes); });
    auto& pool = pools_[{block->stream, block->is_small}];
    if (Block* before = block->before; before && pool.erase(before)) {
      before->bytes += block->bytes;
      before->after = block->after;
      if (block->after)
        block->after->before = before;
      delete block;
      block = before;
    }
    if (Block* after = block->after; after && pool.erase(after)) {
      block->bytes += after->bytes;
      block->after = after->after;
      if (after->after)
        after->after->before = block;
      delete after;
    }
    pool.insert(block);
  }

  /// Blocks that other streams have used come back when these are past it.
  void take_back(bool is_urgent) {
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      bool is_done = true;
      for (const Event& event : it->second) {
        if (is_urgent)
          queues[event.stream].finish(event.task);
        is_done = is_done && queues[event.stream].has_done(event.task);
      }
      if (!is_done) {
        ++it;
        continue;
      }
      for (const Event& event : it->second)
        join(host_clock, event.clock);
      to_pool(it->first);
      it = waiting_.erase(it);
    }
  }

  void release_segments() {
    std::vector<Block*> whole;
    for (auto& [key, pool] : pools_)
      for (Block* block : pool)
        if (!block->before && !block->after)
          whole.push_back(block);
    if (whole.empty())
      return;
    for (int stream = device * kStreams; stream < (device + 1) * kStreams; ++stream) { // as freeing does on devices
      queues[stream].finish(queues[stream].queued());
      join(host_clock, clocks[stream]);
    }
    for (Block* block : whole) {
      pools_[{block->stream, block->is_small}].erase(block);
      forget(reinterpret_cast<uintptr_t>(block->start), reinterpret_cast<uintptr_t>(block->start + block->bytes));
      madvise(inside(block->start), block->bytes, MADV_REMOVE);
      segments_.erase(block->start);
      give_addresses(block->start - mapping().outside, block->bytes);
      count(stats.reserved_bytes, block->bytes, false);
      count(stats.segment, 1, false);
      ++stats.num_device_free;
      ++counters[kSegmentFrees];
      delete block;
    }
  }

  void give_addresses(size_t at, size_t bytes) {
    auto [own, _] = addresses_.emplace(at, bytes);
    auto after = std::next(own);
    if (after != addresses_.end() && at + bytes == after->first) {
      own->second += after->second;
      addresses_.erase(after);
    }
    if (own != addresses_.begin()) {
      auto before = std::prev(own);
      if (before->first + before->second == own->first) {
        before->second += own->second;
        addresses_.erase(own);
      }
    }
  }

  std::map<char*, Block*> blocks_; // allocated
  std::map<char*, size_t> segments_;
  std::map<size_t, size_t> addresses_; // free ones
  std::map<std::pair<int, bool>, std::set<Block*, Smaller>> pools_;
  std::vector<std::pair<Block*, std::vector<Event>>> waiting_;
};

std::array<Memory, kDevices>& memories() {
  static auto& found = *[] {
    auto* made = new std::array<Memory, kDevices>;
    for (int device = 0; device < kDevices; ++device)
      (*made)[device].device = device;
    return made;
  }();
  return found;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    void* found = bytes == 0 ? nullptr : simulated::allocate(device, bytes);
    return {found, found, &free_memory, c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "copy_data of a device's memory"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(mutex);
    for (Memory& memory : memories())
      memory.empty_cache();
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    Lock lock(mutex);
    memories()[stream.device_index()].record_use(memory.get(), stream_index(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(mutex);
    return memories()[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock(mutex);
    memories()[device].stats.allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(mutex);
    auto& stats = memories()[device].stats;
    stats.allocated_bytes[0].reset_peak();
    stats.reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(mutex);
    Memory& memory = memories()[device];
    return {memory.limit - std::min(memory.limit, memory.reserved()), memory.limit};
  }
};

// Page-locked memory of the host.

struct Pinned {
  size_t bytes;
  bool is_registered;
  std::vector<Event> users{};
};
auto& pinned = *new std::map<uintptr_t, Pinned>;
std::vector<std::pair<void*, Pinned>>& leaving = *new std::vector<std::pair<void*, Pinned>>;
std::atomic<int> refusals{0};

void free_those_that_left() {
  auto is_unused = [](const std::pair<void*, Pinned>& one) {
    return std::all_of(one.second.users.begin(), one.second.users.end(),
                       [](const Event& event) { return queues[event.stream].has_done(event.task); });
  };
  for (auto it = leaving.begin(); it != leaving.end();) {
    if (is_unused(*it)) {
      std::free(it->first);
      it = leaving.erase(it);
    } else {
      ++it;
    }
  }
}

void free_pinned(void* address) {
  if (address == nullptr || is_child)
    return;
  Lock lock(mutex);
  auto found = pinned.find(reinterpret_cast<uintptr_t>(address));
  if (found == pinned.end())
    return;
  counters[kPinnedBytes] -= found->second.bytes;
  leaving.emplace_back(address, std::move(found->second));
  pinned.erase(found);
  free_those_that_left();
}

bool refuses() {
  int left = refusals.load();
  return left > 0 && refusals.fetch_sub(1) > 0;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    require_usable();
    if (bytes == 0)
      return {nullptr, nullptr, &free_pinned, c10::kCPU};
    TORCH_CHECK(!refuses(), "simulated accelerator: out of memory that can be page-locked");
    size_t size = 4096;
    while (size < bytes) // as torch's allocators do
      size *= 2;
    void* found = std::aligned_alloc(4096, size);
    TORCH_CHECK(found != nullptr, "no memory");
    Lock lock(mutex);
    free_those_that_left();
    pinned[reinterpret_cast<uintptr_t>(found)] = {size, false};
    counters[kPinnedBytes] += size;
    return {found, found, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

std::map<uintptr_t, Pinned>::iterator pinned_at(const void* address) {
  auto at = reinterpret_cast<uintptr_t>(address);
  auto found = pinned.upper_bound(at);
  if (found == pinned.begin())
    return pinned.end();
  --found;
  return at < found->first + found->second.bytes ? found : pinned.end();
}

// What torch asks of a device.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }
  static c10::Stream stream(int index) {
    return c10::Stream(c10::Stream::UNSAFE, device(index / kStreams), index % kStreams);
  }
  static int index(c10::Device device) { return device.has_index() ? device.index() : device_now; }

  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device to) const override {
    c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device(device_now); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(index(to) < kDevices, "there is no device ", to);
    if (index(to) != device_now) // CUDA makes a context here, unless it is the current device
      use(index(to));
    device_now = index(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override { device_now = index(to); }
  c10::Stream getStream(c10::Device of) const override { return stream(current_stream(index(of))); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(index(of) * kStreams); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    require_usable();
    return stream(index(of) * kStreams + 1 + handed_out[index(of)]++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    c10::Stream before = getStream(to.device());
    stream_now[to.device_index()] = static_cast<int>(to.id());
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    require_usable();
    use(stream.device_index());
    if (*event == nullptr)
      *event = new Event;
    calls_event();
    auto* one = static_cast<Event*>(*event);
    simulated::record(*one, stream_index(stream));
    if (flag == c10::EventFlag::BACKEND_DEFAULT) { // it is to note the time
      one->passed_s = std::make_shared<double>(0);
      queues[one->stream].note(one->task, one->passed_s);
    }
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto *begun = static_cast<Event*>(from), *ended = static_cast<Event*>(to);
    return 1e3 * (bytes_per_s > 0 ? ended->virtual_s - begun->virtual_s : *ended->passed_s - *begun->passed_s);
  }
  void block(void* event, const c10::Stream& stream) const override {
    require_usable();
    calls_event();
    if (event != nullptr)
      make_wait(stream_index(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    require_usable();
    use(device_now); // CUDA's looks at no device
    ++counters[kEventQueries];
    calls_event();
    auto* one = static_cast<Event*>(event);
    if (one == nullptr || one->stream < 0)
      return true;
    if (bytes_per_s > 0) {
      if (host_s[host_now] < one->virtual_s)
        return false;
      queues[one->stream].finish(one->task);
    }
    if (!queues[one->stream].has_done(one->task))
      return false;
    host_knows(*one);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    require_usable();
    use(device_now); // CUDA's looks at no device
    ++counters[kEventWaits];
    auto* one = static_cast<Event*>(event);
    if (one == nullptr || one->stream < 0)
      return;
    queues[one->stream].finish(one->task);
    host_knows(*one);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event != nullptr && is_child) // CUDA's calls the driver, in a destructor
      std::terminate();
    delete static_cast<Event*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    int index = stream_index(stream);
    Event event;
    simulated::record(event, index);
    if (!queues[index].has_done(event.task))
      return false;
    host_knows(event);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    require_usable();
    wait_for_stream(stream_index(stream), kStreamWaits);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    require_usable();
    wait_for_device(device < 0 ? device_now : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    allocator()->recordStream(memory, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

int register_allocator() {
  c10::SetAllocator(c10::kPrivateUse1, allocator());
  return pthread_atfork(nullptr, nullptr, [] { is_child = true; });
}
const int registered = register_allocator();

} // namespace

void require_usable() {
  TORCH_CHECK(!is_child, "simulated accelerator: the child of a fork cannot use a device that its parent uses");
  require_works();
}

int current_device() { return device_now; }
int current_stream(int device) { return device * kStreams + stream_now[device]; }

void launch(int stream, const char* name, const std::vector<Access>& accesses, std::function<void()> run) {
  if (std::strcmp(name, "free") != 0) { // a destructor's: the allocator's books
    require_usable();
    use(stream / kStreams);
    int error = std::exchange(last_error, 0);
    TORCH_CHECK(error == 0, "simulated accelerator: error ", error, ", of an earlier call");
  }
  Lock lock(mutex);
  join(clocks[stream], host_clock);
  ++clocks[stream][stream];
  spend(stream, name, accesses);
  for (const Access& access : accesses)
    note(access, stream, name);
  bool is_copy = std::strcmp(name, "copy to device") == 0 || std::strcmp(name, "copy to host") == 0;
  if (double rate = slow_bytes_per_s; is_copy && rate > 0)
    run = [lasts = std::chrono::duration<double>(accesses.back().bytes / rate), run = std::move(run)] {
      std::this_thread::sleep_for(lasts);
      run();
    };
  queues[stream].push(std::move(run));
}

void wait_for_stream(int stream, Counter counter) {
  ++counters[counter];
  Event event;
  record(event, stream);
  queues[stream].finish(event.task);
  host_knows(event);
}

void hurry(int stream) { queues[stream].finish(queues[stream].queued()); }

void* inside(const void* address) {
  return mapping().inside + (static_cast<const char*>(address) - mapping().outside);
}

bool is_on_device(const void* address) {
  auto* one = static_cast<const char*>(address);
  return one >= mapping().outside && one < mapping().outside + kDevices * kCapacity;
}

void* allocate(int device, size_t bytes) {
  require_usable();
  use(device);
  Lock lock(mutex);
  return memories()[device].allocate(bytes, current_stream(device));
}

void free_memory(void* address) {
  if (address == nullptr || is_child)
    return;
  Lock lock(mutex);
  memories()[(static_cast<char*>(address) - mapping().outside) / kCapacity].free_block(address);
}

c10::DeviceAllocator* allocator() {
  static auto* found = new DeviceMemory;
  return found;
}

c10::Allocator* pinned_allocator() {
  static auto* found = new PinnedMemory;
  return found;
}

bool is_pinned(const void* address, size_t bytes) {
  Lock lock(mutex);
  auto found = pinned_at(address);
  return found != pinned.end() &&
      reinterpret_cast<uintptr_t>(address) + bytes <= found->first + found->second.bytes;
}

void used_by(const void* address, int stream) {
  Lock lock(mutex);
  auto found = pinned_at(address);
  if (found == pinned.end() || found->second.is_registered)
    return;
  auto& users = found->second.users;
  users.erase(std::remove_if(users.begin(), users.end(), [&](const Event& e) { return e.stream == stream; }), users.end());
  users.emplace_back();
  record(users.back(), stream);
}

} // namespace simulated

// What tests ask.

using namespace simulated;

namespace {

template <class Storage>
concept Clears = requires(Storage* storage) { storage->clear_data_ptr_access_error_msg_(); }; // since torch 2.12

template <class Storage>
void allow_access(Storage* storage) {
  if constexpr (Clears<Storage>)
    storage->clear_data_ptr_access_error_msg_();
}

} // namespace

extern "C" {
void simulated_counters(uint64_t* into) { std::copy(counters.begin(), counters.end(), into); }

/// Args: longest_us: how long a stream may do nothing before each of its tasks, while nobody waits for it.
void simulated_delays(uint64_t new_seed, uint64_t longest_us) {
  seed = new_seed;
  longest_delay_us = longest_us;
}

/// Returns the number of races found since the last call, and their texts, a line each.
int simulated_races(char* into, size_t bytes) {
  Lock lock(mutex);
  std::string text;
  for (const std::string& race : races)
    text += race + "\n";
  int found = static_cast<int>(races.size());
  races.clear();
  std::snprintf(into, bytes, "%s", text.c_str());
  return found;
}

void simulated_limit(int device, uint64_t bytes) {
  Lock lock(mutex);
  memories()[device].limit = bytes;
}

/// The allocation that is `count` calls from now runs out of memory; 0: none.
void simulated_fail_allocation(int device, int count) {
  Lock lock(mutex);
  memories()[device].fails_in = count;
}

/// Bits of the devices that have a context.
uint64_t simulated_contexts() { return contexts; }

/// Whether every call fails from now on.
void simulated_fail(int fails) { has_failed = fails != 0; }

// What CUDA builds of torch have under torch._C, and CPU builds have not.
int simulated_can_allow_access() { return Clears<c10::StorageImpl>; }
void simulated_forbid_access(void* storage, const char* message) {
  static_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}
void simulated_allow_access(void* storage) { allow_access(static_cast<c10::StorageImpl*>(storage)); }

/// The next `times` calls that page-lock memory fail.
void simulated_refuse_pinning(int times) { refusals = times; }

int simulated_register(void* address, uint64_t bytes) {
  use(device_now);
  if (refuses())
    return last_error = 2; // out of memory
  Lock lock(mutex);
  auto start = reinterpret_cast<uintptr_t>(address);
  auto next = pinned.lower_bound(start);
  if (pinned_at(address) != pinned.end() || (next != pinned.end() && next->first < start + bytes))
    return last_error = 712; // registered already
  pinned[start] = {bytes, true};
  counters[kPinnedBytes] += bytes;
  return 0;
}

int simulated_unregister(void* address) {
  use(device_now);
  Lock lock(mutex);
  auto found = pinned.find(reinterpret_cast<uintptr_t>(address));
  if (found == pinned.end() || !found->second.is_registered)
    return last_error = 713; // not registered
  counters[kPinnedBytes] -= found->second.bytes;
  pinned.erase(found);
  return 0;
}

/// Copies take so long, on the machine's clock; 0: they take what they take.
void simulated_slow_link(double rate) { slow_bytes_per_s = rate; }

/// Virtual time begins anew. Args: rates of copies each way, and of those between devices; what a matrix product takes;
/// what the host spends on an operation that it launches, on a call with an event, and on waking up. 0: there is none.
void simulated_virtual_time(
    double copied, double exchanged, double product, double of_launch, double of_event, double of_wake) {
  Lock lock(mutex);
  bytes_per_s = copied;
  exchanged_bytes_per_s = exchanged;
  product_s = product;
  launch_s = of_launch;
  event_s = of_event;
  wake_s = of_wake;
  stream_s.fill(0);
  host_s.fill(0);
  spans.clear();
}

/// From now on this thread is one of those that have this clock; at first all have clock 0. Args: counts: whether the
/// host spends time on what it does; 0: it stands for hardware.
void simulated_use_clock(int clock, int counts) {
  host_now = clock;
  is_host = counts != 0;
}

double simulated_host_s(int clock) { return host_s[clock]; }

/// The thread does something for `s`.
void simulated_host_spends(double s) {
  Lock lock(mutex);
  host_spends(s);
}

/// The thread launches something that this device does not know.
void simulated_host_launches() {
  Lock lock(mutex);
  host_spends(launch_s);
}

/// The thread waits for something that ends at `s`.
void simulated_host_until(double s) {
  Lock lock(mutex);
  host_waits(s);
}

/// A line for each copy, matrix product and wait of the host: its stream, or -1 - clock; start and end, and name.
void simulated_spans(char* into, size_t bytes) {
  Lock lock(mutex);
  std::ostringstream text;
  for (const Span& span : spans)
    text << span.stream << " " << span.start << " " << span.end << " " << span.name << "\n";
  std::snprintf(into, bytes, "%s", text.str().c_str());
}

int simulated_device() { return current_device(); }
int simulated_devices() { return kDevices; }
int simulated_is_child() { return is_child; }
}
