// The functions of NVRTC and of the CUDA driver that offload/native/device_program.py calls, for the simulated
// accelerator. Only one text can be compiled, offload/native/device_kernels.h, which this file is compiled with as C++.
// A launch runs it on the memory inside the device, late, and notes what it reads and writes.
#include "device.h"

#include <c10/util/Exception.h>
#include <device_kernels.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

using namespace simulated;

namespace {

constexpr int kInvalidValue = 1, kInvalidContext = 201, kNotFound = 500, kAssert = 710;
constexpr int kCompilation = 6; // NVRTC_ERROR_COMPILATION
const char kCode[] = "device_kernels.h";

struct Program {
  std::string source, log;
};

enum Kernel : uintptr_t { kAdam = 1, kAdamDithered, kSumSquares };
const char* const kNames[] = {"", "offload_device_adam", "offload_device_adam_dithered", "offload_device_sum_squares"};

std::atomic<int> refused_launches{0};
thread_local std::vector<int> contexts_now; // a device each

template <class T>
T argument(void** arguments, int index) {
  T found;
  std::memcpy(&found, arguments[index], sizeof(T));
  return found;
}

size_t element_bytes(int type) { return type == DEVICE_F32 ? 4 : 2; }

/// Makes a call's address of a tensor what the host has for it, and notes that the kernel uses `count` elements from
/// element `from` on.
void use(device_call& call, int index, size_t item, long long from, long long count, bool is_write,
         std::vector<Access>& accesses) {
  auto before = static_cast<uintptr_t>(from) * item;
  auto* address = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(call.tensors[index]) + before);
  TORCH_CHECK(count == 0 || is_on_device(address), "simulated accelerator: a kernel got an address of the host");
  accesses.push_back({address, count * item, is_write});
  auto* found = const_cast<void*>(static_cast<const void*>(inside(address)));
  call.tensors[index] = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(found) - before);
}

void launch_adam(int stream, long long blocks, void** a) {
  std::vector<Access> accesses;
  auto call = argument<device_call>(a, 0);
  auto scalars = argument<device_scalars>(a, 1);
  TORCH_CHECK(call.n <= blocks * DEVICE_ADAM_THREADS, "simulated accelerator: too few blocks");
  use(call, 3, element_bytes(call.types[3]), call.first, call.n, false, accesses);
  for (int state = 0; state < 3; ++state)
    use(call, state, 4, call.first, call.n, true, accesses);
  if (call.types[4] != DEVICE_NONE)
    use(call, 4, element_bytes(call.types[4]), call.first, call.n, true, accesses);
  launch(stream, "adam", accesses, [=] {
    for (long long block = 0; block < blocks; ++block)
      offload_device_adam(block, 0, call, scalars);
  });
}

void launch_adam_dithered(int stream, long long blocks, void** a) {
  std::vector<Access> accesses;
  auto call = argument<device_call>(a, 0);
  auto scalars = argument<device_dithered_scalars>(a, 1);
  TORCH_CHECK(call.n <= blocks * DEVICE_ADAM_THREADS, "simulated accelerator: too few blocks");
  use(call, 6, element_bytes(call.types[6]), call.first, call.n, false, accesses);
  use(call, 0, 4, call.first, call.n, true, accesses);
  for (int moment = 2; moment < 4; ++moment)
    use(call, moment, call.types[moment] == DEVICE_U8 ? 1 : 2, call.first, call.n, true, accesses);
  long long first = call.first / DEVICE_DITHER_BLOCK, last = (call.first + call.n - 1) / DEVICE_DITHER_BLOCK;
  for (int scale = 4; scale < 6 && call.types[scale] != DEVICE_NONE; ++scale)
    use(call, scale, 1, first, last - first + 1, true, accesses);
  use(call, 7, element_bytes(call.types[7]), call.first, call.n, true, accesses);
  launch(stream, "adam_dithered", accesses, [=] {
    for (long long block = 0; block < blocks; ++block)
      offload_device_adam_dithered(block, 0, call, scalars);
  });
}

void launch_sum_squares(int stream, long long blocks, void** a) {
  std::vector<Access> accesses;
  auto call = argument<device_call>(a, 0);
  use(call, 0, element_bytes(call.types[0]), call.first, call.n, false, accesses);
  use(call, 1, 8, call.first / DEVICE_SUM_BLOCK, blocks, true, accesses);
  launch(stream, "sum_squares", accesses, [=] {
    for (long long block = 0; block < blocks; ++block)
      offload_device_sum_squares(block, 0, call);
  });
}

} // namespace

extern "C" {

/// The next `times` launches are refused.
void simulated_refuse_launches(int times) { refused_launches = times; }

const char* nvrtcGetErrorString(int error) { return error == kCompilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }

int nvrtcCreateProgram(Program** program, const char* source, const char*, int, void*, void*) {
  *program = new Program{source, ""};
  return 0;
}

int nvrtcCompileProgram(Program* program, int count, const char** options) {
  std::stringstream known;
  known << std::ifstream(KERNELS_SOURCE).rdbuf();
  bool keeps_order = std::any_of(options, options + count, [](const char* o) { return !std::strcmp(o, "--fmad=false"); });
  if (program->source != known.str())
    program->log = "only device_kernels.h can be compiled";
  else if (!keeps_order)
    program->log = "products would be contracted with sums";
  return program->log.empty() ? 0 : kCompilation;
}

int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  *bytes = program->log.size() + 1;
  return 0;
}

int nvrtcGetProgramLog(Program* program, char* into) {
  std::strcpy(into, program->log.c_str());
  return 0;
}

int nvrtcGetCUBINSize(Program*, size_t* bytes) {
  *bytes = sizeof(kCode);
  return 0;
}

int nvrtcGetCUBIN(Program*, char* into) {
  std::memcpy(into, kCode, sizeof(kCode));
  return 0;
}

int nvrtcDestroyProgram(Program** program) {
  delete std::exchange(*program, nullptr);
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = error == kInvalidContext ? "invalid device context" : "refused by the simulated driver";
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < kDevices ? 0 : kInvalidValue;
}

int cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return 0;
}

int cuDevicePrimaryCtxRetain(uintptr_t* context, int device) {
  *context = device + 1;
  return 0;
}

int cuCtxPushCurrent_v2(uintptr_t context) {
  contexts_now.push_back(static_cast<int>(context) - 1);
  return 0;
}

int cuCtxPopCurrent_v2(uintptr_t*) {
  contexts_now.pop_back();
  return 0;
}

int cuModuleLoadData(uintptr_t* module, const char* code) {
  if (contexts_now.empty())
    return kInvalidContext;
  *module = 1;
  return std::strcmp(code, kCode) ? kInvalidValue : 0;
}

int cuModuleGetFunction(uintptr_t* function, uintptr_t, const char* name) {
  for (*function = kSumSquares; *function && std::strcmp(name, kNames[*function]); --*function) {
  }
  return *function ? 0 : kNotFound;
}

int cuLaunchKernel(
    uintptr_t function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads, unsigned threads_y,
    unsigned threads_z, unsigned shared_bytes, uintptr_t stream, void** arguments, void** extra) {
  if (contexts_now.empty())
    return kInvalidContext;
  bool is_flat = blocks_y == 1 && blocks_z == 1 && threads_y == 1 && threads_z == 1;
  unsigned expected = function == kSumSquares ? DEVICE_SUM_THREADS : DEVICE_ADAM_THREADS;
  if (blocks == 0 || !is_flat || threads != expected || shared_bytes != 0 || extra != nullptr || stream >= kStreams)
    return kInvalidValue;
  if (refused_launches > 0 && refused_launches-- > 0)
    return kInvalidValue;
  try {
    int index = contexts_now.back() * kStreams + static_cast<int>(stream);
    auto run = function == kAdam ? launch_adam : function == kAdamDithered ? launch_adam_dithered : launch_sum_squares;
    run(index, blocks, arguments);
  } catch (const c10::Error&) {
    return kAssert;
  }
  ++counters[kKernels];
  return 0;
}
}
