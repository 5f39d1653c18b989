/* One operation of the CPU on the memory of the device. */
#pragma once

#include "runtime.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace fake {

using Stack = torch::jit::Stack;

inline const c10::DispatchKeySet CPU(c10::DispatchKey::CPU);
inline const c10::DispatchKeySet DEVICE(c10::DispatchKey::PrivateUse1);

inline bool on_device(const at::Tensor& x) { return x.defined() && x.device().is_privateuseone(); }

inline void take_shape(const at::Tensor& x, const at::Tensor& of)
{
    x.unsafeGetTensorImpl()->set_sizes_and_strides(of.sizes(), of.strides(), of.storage_offset());
}

/* Whether it is a Python number, which promotes dtypes in its own way. */
inline void keep_kind(const at::Tensor& x, const at::Tensor& of)
{
    if (of.unsafeGetTensorImpl()->is_wrapped_number()) x.unsafeGetTensorImpl()->set_wrapped_number(true);
}

inline at::Tensor tensor_of(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like)
{
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
    take_shape(made, like);
    made._set_conj(like.is_conj());
    made._set_neg(like.is_neg());
    keep_kind(made, like);
    return made;
}

/* Tensors of the CPU over the memory of the arguments. Arguments that share memory still do, and one
   that is there twice is one. The memory is not kept alive. */
class Twins {
public:
    at::Tensor of(const at::Tensor& x)
    {
        const auto found = tensors_.find(x.unsafeGetTensorImpl());
        if (found != tensors_.end()) return found->second.twin;
        auto* storage = x.storage().unsafeGetStorageImpl();
        auto known = storages_.find(storage);
        if (known == storages_.end()) {
            auto made = c10::make_intrusive<c10::StorageImpl>(
                c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
                c10::DataPtr(storage->mutable_data(), c10::Device(c10::kCPU)), c10::GetCPUAllocator(), true);
            known = storages_.emplace(storage, StoragePair{x.storage(), std::move(made)}).first;
        }
        auto twin = tensor_of(known->second.twin, CPU, x);
        tensors_.emplace(x.unsafeGetTensorImpl(), Pair{x, twin});
        return twin;
    }

    /* Arguments that the operation has resized are resized on the device. */
    void adopt_shapes()
    {
        for (auto& [storage, pair] : storages_) {
            if (pair.twin.data() == storage->data() && pair.twin.nbytes() == storage->nbytes()) continue;
            const c10::DeviceGuard guard(storage->device());
            at::native::resize_bytes_cpu(storage, pair.twin.nbytes());
            if (storage->nbytes())
                std::memcpy(storage->mutable_data(), pair.twin.data(), storage->nbytes());
        }
        for (auto& [impl, pair] : tensors_)
            if (pair.twin.sizes() != pair.given.sizes() || pair.twin.strides() != pair.given.strides())
                take_shape(pair.given, pair.twin);
    }

    /* The argument that a result is, or a view of an argument's memory; nothing for a new tensor. */
    std::optional<at::Tensor> find(const at::Tensor& result) const
    {
        for (auto& [impl, pair] : tensors_)
            if (pair.twin.is_same(result)) return pair.given;
        for (auto& [storage, pair] : storages_)
            if (pair.twin.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
                return tensor_of(pair.given, DEVICE, result);
        return std::nullopt;
    }

private:
    struct Pair {
        at::Tensor given, twin;
    };
    struct StoragePair {
        c10::Storage given, twin;
    };
    std::unordered_map<c10::TensorImpl*, Pair> tensors_;
    std::unordered_map<c10::StorageImpl*, StoragePair> storages_;
};

/* Calls f with every tensor among some values; returns the values with what f returned instead. */
template <class F>
Stack with_tensors(const Stack& values, F f)
{
    Stack changed;
    for (const c10::IValue& value : values) {
        if (value.isTensor()) {
            changed.push_back(f(value.toTensor()));
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& x : value.toTensorVector()) list.push_back(f(x));
            changed.push_back(std::move(list));
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (std::optional<at::Tensor> x : value.toOptionalTensorList())
                list.push_back(x ? std::optional<at::Tensor>(f(*x)) : std::nullopt);
            changed.push_back(std::move(list));
        } else {
            changed.push_back(value);
        }
    }
    return changed;
}

/* An operation's short name: `add_` for aten::add_.Tensor. */
inline std::string name_of(const c10::OperatorHandle& op)
{
    const std::string& name = op.schema().name();
    const auto colon = name.rfind(':');
    return colon == std::string::npos ? name : name.substr(colon + 1);
}

/* What the host waits for on CUDA: the shape of the result, the result itself, or whether it failed. */
inline bool always_waits(const std::string& name)
{
    static const std::unordered_set<std::string> names = {
        "nonzero", "masked_select", "equal", "_unique", "_unique2", "linalg_eig", "_linalg_eigh", "_linalg_svd",
        "linalg_lstsq", "linalg_matrix_exp"};
    return names.count(name);
}

class HostCall {
public:
    HostCall(const c10::OperatorHandle& op, Stack given) : op_(op), name_(name_of(op)), given_(std::move(given))
    {
        find_device();
    }

    bool over_many_devices() const { return many_; }

    Stack run()
    {
        TORCH_CHECK(!many_, mixed_, "at least two devices, fake:0 and fake:1: arguments of ", name_, ".");
        if (waits())
            read(name_);
        else
            launch(name_);
        Stack arguments = on_host();
        Stack results = arguments;
        call(op_, &results);
        twins_.adopt_shapes();
        std::vector<at::Tensor> moved;
        Stack returned = with_tensors(results, [&](const at::Tensor& x) { return to_device(x, &moved); });
        if (capturing)
            capturing->add(name_, [op = op_, arguments, moved] { run_again(op, arguments, moved); });
        return returned;
    }

private:
    static constexpr const char* mixed_ = "Expected all tensors to be on the same device, but found ";

    static void call(const c10::OperatorHandle& op, Stack* stack)
    {
        const at::AutoDispatchBelowADInplaceOrView below;
        op.redispatchBoxed(CPU, stack);
    }

    /* New results go where the first ones went. */
    static void run_again(const c10::OperatorHandle& op, Stack stack, const std::vector<at::Tensor>& moved)
    {
        call(op, &stack);
        size_t next = 0;
        with_tensors(stack, [&](const at::Tensor& x) {
            if (next < moved.size() && moved[next].defined()) {
                auto to = moved[next].storage();
                TORCH_CHECK(to.nbytes() == x.storage().nbytes(), "A replayed operation has a result of another size.");
                if (to.nbytes()) std::memcpy(to.mutable_data(), x.storage().data(), to.nbytes());
            }
            ++next;
            return x;
        });
    }

    const c10::Argument& argument(size_t i) const { return op_.schema().arguments()[i]; }

    /* Arguments that CUDA takes from the CPU, too. */
    bool may_be_on_host(size_t i) const
    {
        return argument(i).name() == "indices" || argument(i).name() == "scalars";
    }

    void find_device()
    {
        for (size_t i = 0; i < given_.size(); ++i) {
            if (given_[i].isDevice() && given_[i].toDevice().is_privateuseone()) meet(given_[i].toDevice());
            with_tensors({given_[i]}, [&](const at::Tensor& x) {
                if (on_device(x)) meet(x.device());
                return x;
            });
        }
        if (index_ < 0) index_ = current;
        for (size_t i = 0; i < given_.size(); ++i) check_host_tensors(i);
    }

    void meet(c10::Device found)
    {
        const auto index = found.has_index() ? found.index() : current;
        many_ = many_ || (index_ >= 0 && index_ != index);
        index_ = index;
    }

    void check_host_tensors(size_t i)
    {
        const auto* alias = argument(i).alias_info();
        const bool written = alias && alias->isWrite();
        with_tensors({given_[i]}, [&](const at::Tensor& x) {
            const bool fits = !x.defined() || on_device(x) || may_be_on_host(i) || (x.dim() == 0 && !written);
            TORCH_CHECK(fits, mixed_, "at least two devices, ", device(index_), " and ", x.device(), ": argument ",
                        argument(i).name(), " of ", name_, ".");
            return x;
        });
    }

    bool waits() const
    {
        if (name_ == "_index_put_impl_") return any(1, is_mask) && given_[2].toTensor().numel() != 1;
        if (name_ == "repeat_interleave") return given_.back().isNone();  // the size of the result
        return always_waits(name_);
    }

    static bool is_mask(const at::Tensor& x)
    {
        return x.defined() && (x.scalar_type() == at::kBool || x.scalar_type() == at::kByte);
    }

    /* Is anything true of one of an argument's tensors? */
    template <class F>
    bool any(size_t i, F f) const
    {
        bool found = false;
        with_tensors({given_[i]}, [&](const at::Tensor& x) {
            found = found || f(x);
            return x;
        });
        return found;
    }

    Stack on_host()
    {
        Stack host;
        for (size_t i = 0; i < given_.size(); ++i) {
            const c10::IValue& value = given_[i];
            if (value.isDevice() && value.toDevice().is_privateuseone())
                host.emplace_back(c10::Device(c10::kCPU));
            else
                host.push_back(with_tensors({value}, [&](const at::Tensor& x) { return to_host(x); }).front());
        }
        return host;
    }

    at::Tensor to_host(const at::Tensor& x)
    {
        if (on_device(x)) return twins_.of(x);
        if (!x.defined() || !capturing) return x;
        at::Tensor frozen = x.clone();  // a graph keeps the number that it was captured with
        keep_kind(frozen, x);
        return frozen;
    }

    /* `moved`: one tensor for each result, undefined for one that is not new; its memory is not kept. */
    at::Tensor to_device(const at::Tensor& result, std::vector<at::Tensor>* moved)
    {
        if (!result.defined()) {
            moved->emplace_back();
            return result;
        }
        if (const auto known = twins_.find(result)) {
            moved->emplace_back();
            return *known;
        }
        const c10::DeviceGuard guard(device(index_));
        const auto bytes = result.storage().nbytes();
        c10::Storage storage = c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), bytes, device_allocator().allocate(bytes), &device_allocator(), true);
        if (bytes) std::memcpy(storage.mutable_data(), result.storage().data(), bytes);
        auto made = tensor_of(std::move(storage), DEVICE, result);
        moved->push_back(Twins().of(made));
        return made;
    }

    const c10::OperatorHandle& op_;
    std::string name_;
    Stack given_;
    Twins twins_;
    c10::DeviceIndex index_ = -1;
    bool many_ = false;
};

}  // namespace fake
