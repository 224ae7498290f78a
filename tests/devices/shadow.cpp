// The device "shadow": its memory is host memory that only its own kernels accept, so that a tensor
// left on the CPU is an error as it would be on a GPU. Kernels are torch's for the CPU, collectives
// those of gloo, or queued as those of NCCL are.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>
#include <torch/library.h>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace {
constexpr auto kDevice = c10::DeviceType::PrivateUse1;

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    return {data, data, &std::free, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    default_copy_data(to, from, size);
  }
};
HostAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

// Host memory that counts as pinned.
struct PinnedAllocator final : c10::Allocator {
  std::map<const char*, size_t> held;
  std::mutex lock;
  c10::DataPtr allocate(size_t size) override;
  void copy_data(void* to, const void* from, std::size_t size) const override {
    default_copy_data(to, from, size);
  }
  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = held.upper_bound(static_cast<const char*>(pointer));
    if (after == held.begin()) return false;
    --after;
    return pointer < after->first + after->second;
  }
};
PinnedAllocator pinned;
void release_pinned(void* data) {
  std::lock_guard<std::mutex> guard(pinned.lock);
  pinned.held.erase(static_cast<const char*>(data));
  std::free(data);
}
c10::DataPtr PinnedAllocator::allocate(size_t size) {
  void* data = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
  std::lock_guard<std::mutex> guard(lock);
  if (data) held[static_cast<const char*>(data)] = size;
  return {data, data, &release_pinned, c10::Device(c10::kCPU)};
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(kDevice, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(getDevice()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(const c10::DeviceIndex) const override;
  void synchronizeStream(const c10::Stream&) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  Generator() : at::CPUGeneratorImpl() {
    device_ = c10::Device(kDevice, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
at::Generator default_generator() {
  static at::Generator one = at::make_generator<Generator>();
  return one;
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
// The memory that queued collectives will write. A kernel that uses it waits, as on a stream.
struct InFlight {
  std::mutex lock;
  std::condition_variable changed;
  std::map<const void*, int> counts;
  std::vector<const void*> add(const std::vector<at::Tensor>& tensors) {
    std::lock_guard<std::mutex> guard(lock);
    std::vector<const void*> places;
    for (const auto& one : tensors) {
      places.push_back(one.storage().data());
      ++counts[places.back()];
    }
    return places;
  }
  void remove(const std::vector<const void*>& places) {
    std::lock_guard<std::mutex> guard(lock);
    for (const void* place : places)
      if (--counts[place] == 0) counts.erase(place);
    changed.notify_all();
  }
  void wait(const at::Tensor& tensor) {
    wait_until([&] { return !counts.count(tensor.storage().data()); });
  }
  void wait_for_all() {
    wait_until([&] { return counts.empty(); });
  }

 private:
  // Some operators start with Python's lock, which the queue needs to release tensors.
  void wait_until(const std::function<bool()>& arrived) {
    std::optional<pybind11::gil_scoped_release> released;
    if (PyGILState_Check()) released.emplace();
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, arrived);
  }
};
InFlight in_flight;
void Guard::synchronizeDevice(const c10::DeviceIndex) const { in_flight.wait_for_all(); }

// The same memory as a CPU tensor.
at::Tensor memory_of(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu()) in_flight.wait(tensor);
  return memory_of(tensor);
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(self));
  return to;
}
void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto data = allocator.allocate(bytes);
  if (bytes && storage->nbytes()) std::memcpy(data.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  const size_t bytes = (self.numel() + self.storage_offset()) * self.element_size();
  if (self.storage().nbytes() < bytes) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}
at::Scalar local_scalar_dense(const at::Tensor& self) { return on_host(self).item(); }
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); }
at::Tensor alias(const at::Tensor& self) { return at::native::alias(self); }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator one = default_generator();
    return one;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(kDevice, 0); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
  bool isPinnedPtr(const void* pointer) const override { return pinned.holds(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& name = op.schema().operator_name().name;
  if (name.rfind("aten::index", 0) != 0 && name.rfind("aten::_index", 0) != 0) {
    const auto count = op.schema().arguments().size();
    auto refuse = [&](const at::Tensor& tensor) {
      TORCH_CHECK(!tensor.defined() || !tensor.device().is_cpu() || tensor.dim() == 0,
          name, ": expected all tensors to be on the same device, found one on the CPU and one on ", kDevice);
    };
    for (const auto& value : torch::jit::last(*stack, count)) {
      if (value.isTensor()) refuse(value.toTensor());
      else if (value.isTensorList()) for (const at::Tensor& one : value.toTensorList()) refuse(one);
    }
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("alias", alias);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}
Hooks hooks;

// A collective that has ended, with tensors of the device as its result.
struct Done final : c10d::Work {
  explicit Done(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(kDevice, 0)});
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors found;
  for (const auto& one : tensors) found.push_back(on_host(one));
  return found;
}
std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> found;
  for (const auto& one : lists) found.push_back(on_host(one));
  return found;
}
Tensors flat(const std::vector<Tensors>& lists) {
  Tensors found;
  for (const auto& list : lists) found.insert(found.end(), list.begin(), list.end());
  return found;
}

// Gloo over the host memory of the device's tensors.
struct HostGloo final : c10d::Backend {
  explicit HostGloo(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hostgloo"; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = on_host(tensors);
    return done(gloo_->broadcast(host, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = on_host(tensors);
    return done(gloo_->allreduce(host, options), tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = on_host(tensors);
    return done(gloo_->allreduce_coalesced(host, options), tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = on_host(tensors);
    return done(gloo_->reduce(host, options), tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    auto host_to = on_host(to);
    auto host_from = on_host(from);
    return done(gloo_->allgather(host_to, host_from, options), flat(to));
  }
  WorkPtr _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) override {
    auto host_to = on_host(to);
    auto host_from = on_host(from);
    return done(gloo_->_allgather_base(host_to, host_from, options), {to});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < to.size(); ++i) _allgather_base(to[i], from[i], options);
    return c10::make_intrusive<Done>(to);
  }
  WorkPtr gather(std::vector<Tensors>& to, Tensors& from, const c10d::GatherOptions& options) override {
    auto host_to = on_host(to);
    auto host_from = on_host(from);
    return done(gloo_->gather(host_to, host_from, options), flat(to));
  }
  WorkPtr scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& options) override {
    auto host_to = on_host(to);
    auto host_from = on_host(from);
    return done(gloo_->scatter(host_to, host_from, options), to);
  }
  WorkPtr reduce_scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ReduceScatterOptions& options) override {
    auto host_to = on_host(to);
    auto host_from = on_host(from);
    return waited(gloo_->reduce_scatter(host_to, host_from, options), to);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) override {
    auto host_to = on_host(to);
    auto host_from = on_host(from);
    return waited(gloo_->_reduce_scatter_base(host_to, host_from, options), {to});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < to.size(); ++i) _reduce_scatter_base(to[i], from[i], options);
    return c10::make_intrusive<Done>(to);
  }
  WorkPtr alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_sizes,
      std::vector<int64_t>& from_sizes, const c10d::AllToAllOptions& options) override {
    auto host_to = on_host(to);
    auto host_from = on_host(from);
    return done(gloo_->alltoall_base(host_to, host_from, to_sizes, from_sizes, options), {to});
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto host = on_host(tensors);
    return gloo_->send(host, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto host = on_host(tensors);
    return gloo_->recv(host, from, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }
  void abort() override { aborted_ = true; }

 private:
  WorkPtr done(const WorkPtr& work, const Tensors& outputs) {
    while (!work->isCompleted()) {
      TORCH_CHECK(!aborted_, "the communicator was aborted");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    work->wait();
    return c10::make_intrusive<Done>(outputs);
  }
  // gloo carries these out while it is waited for.
  static WorkPtr waited(const WorkPtr& work, const Tensors& outputs) {
    work->wait();
    return c10::make_intrusive<Done>(outputs);
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::atomic<bool> aborted_{false};
};

// Collectives as NCCL has them: queued, so that the host never waits; carried out in the order of the
// queue; matched between the ranks by that order alone, whatever the operation and its size. A rank
// reads as many bytes as it expects, whatever the others have sent.
struct Ordered final : c10d::Backend {
  static constexpr int64_t kSlot = 1 << 18;  // bytes of one message, at most

  struct Job {
    at::Tensor row;  // what this rank sends
    std::vector<const void*> places;  // that are written
    std::function<void(const at::Tensor&)> finish;  // takes what all ranks have sent
  };
  struct Queue {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<Job> jobs;
    bool ends = false, aborted = false;
    c10::intrusive_ptr<c10d::Backend> gloo;

    void drop() {
      std::deque<Job> dropped;  // whose tensors may need Python's lock, so not under this one
      std::lock_guard<std::mutex> guard(lock);
      aborted = true;
      for (const auto& job : jobs) in_flight.remove(job.places);
      jobs.swap(dropped);
      changed.notify_all();
    }
    void run() {
      at::NoGradGuard no_grad;
      while (true) {
        Job job;
        {
          std::unique_lock<std::mutex> guard(lock);
          changed.wait(guard, [&] { return ends || !jobs.empty(); });
          if (jobs.empty()) return;
          job = jobs.front();
        }
        bool arrived = true;
        auto all = at::zeros({gloo->getSize(), kSlot}, at::kByte);
        try {
          gloo->_allgather_base(all, job.row)->wait();
        } catch (const std::exception&) {
          arrived = false;
        }
        std::unique_lock<std::mutex> guard(lock);
        // A kernel waits for a lost rank until its own communicator is aborted.
        if (!arrived) changed.wait(guard, [&] { return ends || jobs.empty(); });
        if (jobs.empty() || !arrived) return;
        job.finish(all);
        jobs.pop_front();
        in_flight.remove(job.places);
      }
    }
  };

  explicit Ordered(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), queue_(std::make_shared<Queue>()) {
    queue_->gloo = std::move(gloo);
    std::thread([queue = queue_] { queue->run(); }).detach();
  }
  ~Ordered() override {
    std::lock_guard<std::mutex> guard(queue_->lock);
    queue_->ends = true;
    queue_->changed.notify_all();
  }
  const std::string getBackendName() const override { return "ordered"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { queue_->gloo->setTimeout(timeout); }
  void abort() override { queue_->drop(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return enqueue(tensors, tensors, [to = tensors, root = options.rootRank](const at::Tensor& all) {
      fill(to, all[root]);
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return enqueue(tensors, tensors, [to = tensors, op = options.reduceOp](const at::Tensor& all) {
      int64_t at = 0;
      for (const auto& one : to) {
        memory_of(one).copy_(combined(rows(all, at, one), op).view(one.sizes()));
        at += one.nbytes();
      }
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions&) override {
    return enqueue(from, to[0], [to = to[0]](const at::Tensor& all) {
      for (size_t rank = 0; rank < to.size(); ++rank) fill({to[rank]}, all[rank]);
    });
  }
  WorkPtr _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions&) override {
    return enqueue({from}, {to}, [to = to](const at::Tensor& all) {
      const auto own = memory_of(to).view({all.size(0), -1});
      for (int64_t rank = 0; rank < all.size(0); ++rank) fill({own[rank]}, all[rank]);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < to.size(); ++i) last = _allgather_base(to[i], from[i], options);
    return last;
  }
  WorkPtr _reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) override {
    return enqueue({from}, {to}, [to = to, rank = getRank(), op = options.reduceOp](const at::Tensor& all) {
      memory_of(to).copy_(combined(rows(all, rank * static_cast<int64_t>(to.nbytes()), to), op).view(to.sizes()));
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < to.size(); ++i) last = _reduce_scatter_base(to[i], from[i], options);
    return last;
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return enqueue({}, {}, [](const at::Tensor&) {});
  }

 private:
  // The values of all ranks in place of this tensor's, (ranks, values), from a byte of their messages.
  static at::Tensor rows(const at::Tensor& all, int64_t at, const at::Tensor& like) {
    return all.narrow(1, at, like.nbytes()).contiguous().view(like.scalar_type());
  }
  static at::Tensor combined(const at::Tensor& rows, const c10d::ReduceOp& op) {
    switch (op) {
      case c10d::ReduceOp::SUM: return at::sum(rows, 0, false, rows.scalar_type());
      case c10d::ReduceOp::AVG: return at::mean(rows, 0);
      case c10d::ReduceOp::MAX: return at::amax(rows, 0);
      case c10d::ReduceOp::MIN: return at::amin(rows, 0);
      case c10d::ReduceOp::PRODUCT: return at::prod(rows, 0, false, rows.scalar_type());
      case c10d::ReduceOp::PREMUL_SUM: {
        auto factor = c10::static_intrusive_pointer_cast<c10d::NCCLPreMulSumSupplement>(op.supplement_);
        return at::sum(rows * factor->double_factor, 0, false, rows.scalar_type());
      }
      default: TORCH_CHECK(false, "not an operation of this backend");
    }
  }
  static void fill(const Tensors& to, const at::Tensor& bytes) {
    int64_t at = 0;
    for (const auto& one : to) {
      memory_of(one).copy_(bytes.narrow(0, at, one.nbytes()).clone().view(one.scalar_type()).view(one.sizes()));
      at += one.nbytes();
    }
  }
  WorkPtr enqueue(const Tensors& inputs, const Tensors& outputs, std::function<void(const at::Tensor&)> finish) {
    int64_t size = 0;
    for (const auto& one : inputs) size += one.nbytes();
    TORCH_CHECK(size <= kSlot, "the queue of this test device takes ", kSlot, " bytes at once, not ", size);
    // Kernels run on the host here, so that their values are complete. What a collective is about to
    // write is waited for.
    auto row = at::zeros({1, kSlot}, at::kByte);
    int64_t at = 0;
    for (const auto& one : inputs) {
      auto bytes = on_host(one).contiguous().view(-1).view(at::kByte);
      row[0].narrow(0, at, bytes.numel()).copy_(bytes);
      at += bytes.numel();
    }
    std::lock_guard<std::mutex> guard(queue_->lock);
    TORCH_CHECK(!queue_->aborted, "NCCL communicator was aborted");  // begins as NCCL's error
    queue_->jobs.push_back({row, in_flight.add(outputs), std::move(finish)});
    queue_->changed.notify_all();
    return c10::make_intrusive<Done>(outputs);
  }
  std::shared_ptr<Queue> queue_;
};
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("default_generator", &default_generator);
  m.def("host_gloo", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<HostGloo>(std::move(gloo));
  });
  m.def("ordered", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Ordered>(std::move(gloo));
  });
}
