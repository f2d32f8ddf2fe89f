// The functions of NVRTC and of the CUDA driver that offload/native/device_program.py calls, for the simulated
// accelerator. Only one text can be compiled, offload/native/device_kernels.h, which this library was built with as C++.
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

enum Kernel : uintptr_t { kAdam = 1, kSumSquares };

std::atomic<int> refused_launches{0};
thread_local std::vector<int> contexts_now; // a device each

template <class T>
T argument(void** arguments, int index) {
  T found;
  std::memcpy(&found, arguments[index], sizeof(T));
  return found;
}

/// What the host has as the address of `count` elements; notes that a kernel uses them.
template <class T>
T* used(void** arguments, int index, size_t bytes, bool is_write, std::vector<Access>& accesses) {
  auto* address = argument<T*>(arguments, index);
  TORCH_CHECK(bytes == 0 || is_on_device(address), "simulated accelerator: a kernel got an address of the host");
  accesses.push_back({address, bytes, is_write});
  return static_cast<T*>(inside(address));
}

size_t element_bytes(int type) { return type == DEVICE_F32 ? 4 : 2; }

void launch_adam(int stream, long long blocks, void** a) {
  std::vector<Access> accesses;
  int grad_type = argument<int>(a, 4), out_type = argument<int>(a, 6);
  auto n = argument<long long>(a, 7);
  auto scalars = argument<device_scalars>(a, 8);
  TORCH_CHECK(n <= blocks * DEVICE_ADAM_THREADS, "simulated accelerator: too few blocks");
  auto* grad = used<const void>(a, 3, n * element_bytes(grad_type), false, accesses);
  auto* p = used<float>(a, 0, n * 4, true, accesses);
  auto* m = used<float>(a, 1, n * 4, true, accesses);
  auto* v = used<float>(a, 2, n * 4, true, accesses);
  void* out = out_type == DEVICE_NONE ? nullptr : used<void>(a, 5, n * 2, true, accesses);
  launch(stream, "adam", accesses, [=] {
    for (long long block = 0; block < blocks; ++block)
      offload_device_adam(block, 0, p, m, v, grad, grad_type, out, out_type, n, scalars);
  });
}

void launch_sum_squares(int stream, long long blocks, void** a) {
  std::vector<Access> accesses;
  int type = argument<int>(a, 1);
  auto first = argument<long long>(a, 2), n = argument<long long>(a, 3);
  auto* x = used<const void>(a, 0, n * element_bytes(type), false, accesses);
  auto* sums = used<double>(a, 4, blocks * 8, true, accesses);
  launch(stream, "sum_squares", accesses, [=] {
    for (long long block = 0; block < blocks; ++block)
      offload_device_sum_squares(block, 0, x, type, first, n, sums);
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
  *function = !std::strcmp(name, "offload_device_adam") ? kAdam : !std::strcmp(name, "offload_device_sum_squares") ? kSumSquares : 0;
  return *function ? 0 : kNotFound;
}

int cuLaunchKernel(
    uintptr_t function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads, unsigned threads_y,
    unsigned threads_z, unsigned shared_bytes, uintptr_t stream, void** arguments, void** extra) {
  if (contexts_now.empty())
    return kInvalidContext;
  bool is_flat = blocks_y == 1 && blocks_z == 1 && threads_y == 1 && threads_z == 1;
  unsigned expected = function == kAdam ? DEVICE_ADAM_THREADS : DEVICE_SUM_THREADS;
  if (blocks == 0 || !is_flat || threads != expected || shared_bytes != 0 || extra != nullptr || stream >= kStreams)
    return kInvalidValue;
  if (refused_launches > 0 && refused_launches-- > 0)
    return kInvalidValue;
  try {
    int index = contexts_now.back() * kStreams + static_cast<int>(stream);
    function == kAdam ? launch_adam(index, blocks, arguments) : launch_sum_squares(index, blocks, arguments);
  } catch (const c10::Error&) {
    return kAssert;
  }
  ++counters[kKernels];
  return 0;
}
}
