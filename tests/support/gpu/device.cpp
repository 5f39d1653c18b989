/* A device for tests, whose memory is the host's: see device.py. */

#include "host_call.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

namespace py = pybind11;

namespace fake {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> on, std::optional<bool>, std::optional<at::MemoryFormat> format)
{
    const c10::DeviceGuard guard(on.value_or(device(current)));
    return at::detail::empty_generic(size, &device_allocator(), DEVICE, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> on, std::optional<bool>)
{
    const c10::DeviceGuard guard(on.value_or(device(current)));
    return at::detail::empty_strided_generic(size, stride, &device_allocator(), DEVICE, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& x, at::IntArrayRef size, std::optional<at::MemoryFormat> format)
{
    const c10::DeviceGuard guard(x.device());
    return at::native::resize_(x, size, format);
}

at::Tensor& set_to_slice(
    at::Tensor& x, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride)
{
    const c10::DeviceGuard guard(x.device());
    return at::native::set_storage_cpu_(x, std::move(source), offset, size, stride);
}

at::Tensor& set_to_nothing(at::Tensor& x)
{
    const c10::DeviceGuard guard(x.device());
    c10::Storage nothing = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(), true);
    return at::native::set_storage_cpu_(x, std::move(nothing), 0, {0}, {});
}

/* Whether memory is copied as it is, out of or into pinned memory, and nobody waits. */
bool in_background(const at::Tensor& from, const at::Tensor& to, bool non_blocking)
{
    if (!non_blocking || on_device(from) == on_device(to)) return false;
    const at::Tensor& host = on_device(from) ? to : from;
    return host.is_contiguous() && from.dtype() == to.dtype() && from.sizes() == to.sizes() &&
        from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg() && is_pinned(host.storage().data());
}

void count_copy(const at::Tensor& from, const at::Tensor& to, bool background)
{
    if (on_device(from) && on_device(to)) return launch("copy_");
    if (!background) return on_device(from) ? read("copy_") : upload("copy_");
    ++(on_device(from) ? counters.downloads : counters.pinned);
    note(on_device(from) ? "download" : "pinned");
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking)
{
    if (!to.numel()) return to;
    const bool background = in_background(from, to, non_blocking);
    count_copy(from, to, background);
    Twins twins;
    const at::Tensor source = twins.of(from), target = twins.of(to);
    const bool flies = background && on_device(to);
    const auto step = [source, target, flies] {
        const at::AutoDispatchBelowADInplaceOrView below;
        if (flies) depart(source.data_ptr(), source.nbytes());
        at::Tensor(target).copy_(source);
    };
    step();
    if (capturing) capturing->add("copy_", step);
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to)
{
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& x)
{
    read("item");
    return at::_local_scalar_dense(Twins().of(x));
}

Stack pop_arguments(const c10::OperatorHandle& op, Stack* stack)
{
    Stack given = torch::jit::pop(*stack, op.schema().arguments().size());
    return given;
}

void on_host(const c10::OperatorHandle& op, Stack* stack)
{
    Stack returned = HostCall(op, pop_arguments(op, stack)).run();
    stack->insert(stack->end(), returned.begin(), returned.end());
}

bool lie_apart(const Stack& given)
{
    std::unordered_set<int> places;
    with_tensors(given, [&](const at::Tensor& x) {
        places.insert(on_device(x) ? x.device().index() : -1);
        return x;
    });
    return places.size() > 1;
}

/* One launch for a list. Over several devices, and for copies to or from the host, one for each tensor. */
void on_host_as_one(const c10::OperatorHandle& op, Stack* stack)
{
    const Stack given = pop_arguments(op, stack);
    const bool copies = op.schema().name() == "aten::_foreach_copy_";
    Stack returned = given;
    if (copies ? lie_apart(given) : HostCall(op, given).over_many_devices())
        op.redispatchBoxed(CPU, &returned);  // which goes through the lists
    else
        returned = HostCall(op, given).run();
    stack->insert(stack->end(), returned.begin(), returned.end());
}

/* Has the CPU a kernel for what other devices put together out of several operations? */
bool has_own_kernel(const c10::OperatorName& name)
{
    const auto op = c10::Dispatcher::singleton().findOp(name);
    return name.name.rfind("aten::", 0) == 0 && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("resize_", &resize);
    m.impl("set_", &set_to_nothing);
    m.impl("set_.source_Storage", &at::native::set_);
    m.impl("set_.source_Storage_storage_offset", &set_to_slice);
    m.impl("set_.source_Tensor", &at::native::set_tensor_);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("unfold", &at::native::unfold);
    m.impl("view_as_real", &at::native::view_as_real);
    m.impl("view_as_complex", &at::native::view_as_complex);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &item);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
        const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
        if (name.name.rfind("aten::_foreach_", 0) == 0)
            m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host_as_one>());
        else if (has_own_kernel(name))
            m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
    }
}

/* Copies read conjugated and negated tensors as they are. */
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

std::vector<std::string> names(const Graph& graph)
{
    std::vector<std::string> all;
    for (auto& [name, step] : graph.steps) all.push_back(name);
    return all;
}

py::tuple counts()
{
    return py::make_tuple(
        counters.reads.load(), counters.uploads.load(), counters.pinned.load(), counters.downloads.load(),
        counters.operations.load());
}

void reset_counts()
{
    for (auto* each : {&counters.reads, &counters.uploads, &counters.pinned, &counters.downloads, &counters.operations})
        each->store(0);
}

void record(const std::string& name, std::function<void()> step)
{
    launch(name);
    if (capturing)
        capturing->add(name, std::move(step));
    else
        step();
}

std::vector<std::string> take_log()
{
    const std::lock_guard<std::mutex> lock(log_mutex);
    return std::exchange(log, {});
}

PYBIND11_MODULE(fake_device, m)
{
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::SetAllocator(c10::kPrivateUse1, &device_allocator());

    py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
        .def("replay", &Graph::replay)
        .def_property_readonly("names", &names);
    m.def("begin_capture", &begin_capture);
    m.def("end_capture", &end_capture);
    m.def("is_capturing", [] { return bool(capturing); });
    m.def("record", &record);
    m.def("counts", &counts);
    m.def("reset_counts", &reset_counts);
    m.def("set_raising", [](bool on) { return raising.exchange(on); });
    m.def("set_logging", [](bool on) { return logging.exchange(on); });
    m.def("take_log", &take_log);
    m.def("current_device", [] { return int(current); });
    m.def("exchange_device", [](int index) { return int(exchange(c10::DeviceIndex(index))); });
    m.def("device_count", [] { return int(DEVICES); });
    m.def("owner", [](uintptr_t place) -> py::object {
        c10::DeviceIndex owner;
        if (!memory().find(reinterpret_cast<void*>(place), &owner)) return py::none();
        return py::int_(int(owner));
    });
}

}  // namespace fake
