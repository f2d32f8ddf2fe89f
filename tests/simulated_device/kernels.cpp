// What torch calls with tensors of the simulated accelerator. Kernels are those of the CPU: they read the memory inside
// the device when they are called, after what their stream has queued, and their results are written late. Copies read
// late too.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_ops.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>

namespace simulated {
namespace {

using at::Tensor;
using c10::IValue;

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == c10::kPrivateUse1; }

/// Bytes from the first element to the last.
size_t extent(const Tensor& tensor) {
  if (tensor.numel() == 0)
    return 0;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return (last + 1) * tensor.element_size();
}

const void* address_of(const Tensor& tensor) {
  if (tensor.numel() == 0)
    return nullptr;
  auto* start = static_cast<const char*>(tensor.storage().data());
  size_t offset = tensor.storage_offset() * tensor.element_size();
  TORCH_CHECK(
      offset + extent(tensor) <= tensor.storage().nbytes(), "simulated accelerator: a kernel uses ", extent(tensor),
      " bytes from ", offset, " on of a storage of ", tensor.storage().nbytes());
  return start + offset;
}

Access reads(const Tensor& tensor) { return {address_of(tensor), extent(tensor), false}; }
Access writes(const Tensor& tensor) { return {address_of(tensor), extent(tensor), true}; }

Tensor over(void* memory, const Tensor& like) {
  return at::from_blob(memory, like.sizes(), like.strides(), like.options().device(c10::kCPU));
}

/// A device's tensor as kernels see it.
Tensor in_device(const Tensor& tensor) {
  const void* address = address_of(tensor);
  Tensor found = over(address == nullptr ? nullptr : inside(address), tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    found.unsafeGetTensorImpl()->set_wrapped_number(true);
  return found;
}

void put(const Tensor& to, const Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
}

// Memory.

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr memory = allocator()->allocate(bytes);
  if (size_t kept = std::min(bytes, storage.nbytes()); kept > 0) {
    const void* from = storage.data();
    void* to = memory.get();
    launch(current_stream(storage.device().index()), "resize", {{from, kept, false}, {to, kept, true}},
           [to = inside(to), from = inside(from), kept] { std::memcpy(to, from, kept); });
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

void place(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(size, stride, offset);
  size_t needed = offset * tensor.element_size() + extent(tensor);
  if (needed > tensor.storage().nbytes())
    resize_storage(tensor.storage(), needed);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  place(self, size, c10::contiguous_strides(size), self.storage_offset());
  if (format.has_value() && *format != at::MemoryFormat::Preserve)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_part(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  place(self, size, stride.empty() && !size.empty() ? at::IntArrayRef(c10::contiguous_strides(size)) : stride, offset);
  return self;
}

Tensor& set_whole(Tensor& self, c10::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_part(self, std::move(source), 0, {numel}, {1});
}

void record_stream(Tensor& self, c10::Stream stream) { allocator()->recordStream(self.storage().data_ptr(), stream); }

// Copies.

Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  int device = (is_ours(src) ? src : dst).device().index(), stream = current_stream(device);
  if (is_ours(src) && is_ours(dst)) {
    TORCH_CHECK(src.device() == dst.device(), "simulated accelerator: no copies between devices");
    ++counters[kOnDevice];
    launch(stream, "copy", {reads(src), writes(dst)}, [to = in_device(dst), from = in_device(src)] { put(to, from); });
    return dst;
  }
  bool is_late = non_blocking;
  if (is_ours(dst)) {
    // As on CUDA: what has another dtype or layout is first converted on the host, into memory that is not page-locked.
    Tensor held = src.to(dst.scalar_type()).expand(dst.sizes()).contiguous();
    bool is_locked = is_pinned(held.data_ptr(), held.nbytes());
    ++counters[kToDevice];
    counters[kToDeviceBytes] += held.nbytes();
    if (non_blocking && is_locked) {
      launch(stream, "copy to device", {{held.data_ptr(), held.nbytes(), false}, writes(dst)},
             [to = in_device(dst), from = over(held.data_ptr(), held)] { put(to, from); });
      used_by(held.data_ptr(), stream);
    } else {
      counters[kPageableNonBlocking] += non_blocking;
      launch(stream, "copy to device", {writes(dst)}, [to = in_device(dst), from = held.clone()] { put(to, from); });
    }
  } else {
    is_late = non_blocking && is_pinned(dst.data_ptr(), extent(dst));
    counters[kPageableNonBlocking] += non_blocking && !is_late;
    ++counters[kToHost];
    counters[kToHostBytes] += src.nbytes();
    std::vector<Access> accesses{reads(src)};
    if (is_late)
      accesses.push_back({dst.data_ptr(), extent(dst), true});
    launch(stream, "copy to host", accesses, [to = over(dst.data_ptr(), dst), from = in_device(src)] { put(to, from); });
    if (is_late)
      used_by(dst.data_ptr(), stream);
  }
  if (!is_late)
    wait_for_stream(stream, kBlockingCopies);
  return dst;
}

// Random numbers: each device has a state of its own, that of a CPU's generator.

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(c10::kPrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.unsafeGetGeneratorImpl()->get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new DeviceGenerator(device_.index(), host.clone()); }

  at::Generator host;
};

const at::Generator& default_generator(int device) {
  static auto& found = *[] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < kDevices; ++index)
      made->push_back(at::make_generator<DeviceGenerator>(index));
    return made;
  }();
  return found.at(device < 0 ? current_device() : device);
}

const at::Generator& on_host(const at::Generator& generator) {
  return static_cast<const DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

// Kernels.

/// One call of an operation: its arguments as the CPU's kernel gets them, and what it writes to.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {}

  void run(void (*kernel)(const c10::OperatorHandle&, torch::jit::Stack*)) {
    size_t count = schema_.arguments().size(), begin = stack_->size() - count;
    given_.assign(stack_->begin() + begin, stack_->end());
    find_device();
    c10::DeviceGuard guard(c10::Device(c10::kPrivateUse1, device_));
    int stream = current_stream(device_);
    require_usable();
    hurry(stream);
    for (size_t i = 0; i < count; ++i) {
      const auto& argument = schema_.arguments()[i];
      (*stack_)[begin + i] = convert(given_[i], argument.alias_info() && argument.alias_info()->isWrite(), argument);
    }
    kernel(op_, stack_);
    ++counters[kKernels];
    bool is_read_by_host = give_back();
    std::vector<Tensor> to, from;
    for (auto& [target, values] : written_) {
      if (!target.sizes().equals(values.sizes()))
        resize_(target, values.sizes(), std::nullopt);
      accesses_.push_back(writes(target));
      to.push_back(in_device(target));
      from.push_back(values);
    }
    launch(stream, schema_.name().c_str(), accesses_, [to = std::move(to), from = std::move(from)] {
      for (size_t i = 0; i < to.size(); ++i)
        put(to[i], from[i]);
    });
    if (is_read_by_host)
      wait_for_stream(stream, kBlockingCopies);
  }

 private:
  void find_device() {
    for (const IValue& value : given_) {
      if (value.isTensor() && is_ours(value.toTensor()))
        device_ = value.toTensor().device().index();
      else if (value.isTensorList() && !value.toTensorList().empty() && is_ours(value.toTensorList().get(0)))
        device_ = value.toTensorList().get(0).device().index();
      else if (value.isDevice() && value.toDevice().has_index())
        device_ = value.toDevice().index();
      else
        continue;
      return;
    }
    device_ = static_cast<c10::DeviceIndex>(current_device());
  }

  Tensor convert(const Tensor& tensor, bool is_written) {
    if (!is_ours(tensor)) {
      TORCH_CHECK(
          !tensor.defined() || tensor.dim() == 0 || schema_.name().find("index") != std::string::npos,
          "Expected all tensors to be on the same device, but ", schema_.name(), " got one on the CPU");
      return tensor;
    }
    accesses_.push_back(reads(tensor));
    Tensor found = in_device(tensor);
    if (is_written) {
      found = found.clone();
      written_.emplace_back(tensor, found);
    }
    return found;
  }

  IValue convert(const IValue& value, bool is_written, const c10::Argument& argument) {
    if (value.isTensor())
      return convert(value.toTensor(), is_written);
    if (value.isTensorList()) {
      c10::List<Tensor> found;
      for (const Tensor& one : value.toTensorVector())
        found.push_back(convert(one, is_written));
      return found;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> found;
      for (const std::optional<Tensor>& one : value.toOptionalTensorVector())
        found.push_back(one.has_value() ? std::optional<Tensor>(convert(*one, is_written)) : one);
      return found;
    }
    if (value.isDevice() && value.toDevice().type() == c10::kPrivateUse1)
      return c10::Device(c10::kCPU);
    if (value.isGenerator())
      return value.toGenerator().device().type() == c10::kPrivateUse1 ? IValue(on_host(value.toGenerator())) : value;
    if (value.isNone() && argument.type()->str() == "Generator?")
      return on_host(default_generator(device_));
    return value;
  }

  /// Puts results on the device. Returns whether some are the host's.
  bool give_back() {
    size_t count = schema_.returns().size(), begin = stack_->size() - count;
    bool is_read_by_host = false;
    for (size_t i = 0; i < count; ++i) {
      IValue& value = (*stack_)[begin + i];
      const auto* info = schema_.returns()[i].alias_info();
      if (info != nullptr) {
        TORCH_CHECK(info->isWrite(), schema_.name(), " gives a view: the simulated accelerator has no such kernel");
        for (size_t at = 0; at < given_.size(); ++at) {
          const auto* other = schema_.arguments()[at].alias_info();
          if (other != nullptr && *other == *info)
            value = given_[at];
        }
      } else if (value.isTensor()) {
        value = result(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> found;
        for (const Tensor& one : value.toTensorVector())
          found.push_back(result(one));
        value = found;
      } else {
        is_read_by_host = true;
      }
    }
    return is_read_by_host;
  }

  Tensor result(const Tensor& made) {
    if (!made.defined())
      return made;
    Tensor target = empty_strided(
        made.sizes(), made.strides(), made.scalar_type(), std::nullopt, c10::Device(c10::kPrivateUse1, device_),
        std::nullopt);
    written_.emplace_back(target, is_on_device_inside(made) ? made.clone() : made);
    return target;
  }

  bool is_on_device_inside(const Tensor& made) const {
    for (const Access& access : accesses_)
      if (access.start != nullptr && made.numel() > 0 && inside(access.start) == made.storage().data())
        return true;
    return false;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::vector<IValue> given_;
  c10::DeviceIndex device_ = 0;
  std::vector<Access> accesses_;
  std::vector<std::pair<Tensor, Tensor>> written_; // on the device, and what is to be there
};

void cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

/// Rounded as IEEE 754 has it, and as devices do; the CPU's own is an ulp off. Of fp32.
void exact_sqrt(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t count = op.schema().arguments().size(), begin = stack->size() - count;
  Tensor self = (*stack)[begin].toTensor();
  if (self.scalar_type() != at::kFloat)
    return cpu_kernel(op, stack);
  Tensor from = self.contiguous(), to = at::empty_like(from);
  for (int64_t i = 0; i < from.numel(); ++i)
    to.data_ptr<float>()[i] = std::sqrt(from.data_ptr<float>()[i]);
  if (op.schema().arguments().back().alias_info() != nullptr) { // sqrt_, or sqrt.out
    Tensor out = stack->back().toTensor();
    put(out.sizes().equals(to.sizes()) ? out : out.resize_(to.sizes()), to);
    to = out;
  }
  torch::jit::drop(*stack, count);
  stack->emplace_back(to);
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run(op.schema().name() == "aten::sqrt" ? &exact_sqrt : &cpu_kernel);
}

/// `p.data = x` takes a tensor of the CPU, and back, as on other devices.
bool can_become(const Tensor&, const Tensor&) { return true; }

/// Torch's plain form, of other operations; the CPU's own choice would be a kernel that has no backward here.
int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_whole));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(can_become));
  m.impl("_fused_sdp_choice", TORCH_FN(choose_attention));
  m.impl("native_dropout", TORCH_FN(at::native::native_dropout_cpu)); // of operations that draw from a generator's numbers
  // These have a form for any device, of other operations; the CPU's own has the CPU's bits.
  for (const char* name : {"native_layer_norm", "native_group_norm", "convolution", "convolution_backward", "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override { require_usable(); }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { guard().setDevice({c10::kPrivateUse1, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return guard().exchangeDevice({c10::kPrivateUse1, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::kPrivateUse1, getCurrentDevice()}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? getCurrentDevice() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }

  static const c10::impl::DeviceGuardImplInterface& guard() {
    return *c10::impl::getDeviceGuardImpl(c10::kPrivateUse1);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace
} // namespace simulated


extern "C" {
/// Copies the state of a device's random numbers. Returns its bytes. Args: into: null: only asks for the number.
uint64_t simulated_random_state(int device, char* into) {
  at::Tensor state = simulated::on_host(simulated::default_generator(device)).get_state();
  if (into != nullptr)
    std::memcpy(into, state.data_ptr(), state.nbytes());
  return state.nbytes();
}

void simulated_set_random_state(int device, char* from) {
  at::Generator generator = simulated::on_host(simulated::default_generator(device));
  at::Tensor state = generator.get_state();
  std::memcpy(state.data_ptr(), from, state.nbytes());
  generator.unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
}

void simulated_seed(uint64_t seed) {
  for (int device = 0; device < simulated::kDevices; ++device)
    simulated::on_host(simulated::default_generator(device)).unsafeGetGeneratorImpl()->set_current_seed(seed);
}
}
