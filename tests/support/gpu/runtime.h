/* What torch asks of a device beside operations: indices, streams, events, random numbers. */
#pragma once

#include "events.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fake {

inline c10::Device device(c10::DeviceIndex index) { return {c10::kPrivateUse1, index}; }

inline c10::DeviceIndex exchange(c10::DeviceIndex index)
{
    TORCH_CHECK(
        index >= 0 && index < DEVICES, "There is no device ", int(index), "; there are ", int(DEVICES), ".");
    return std::exchange(current, index);
}

inline thread_local std::array<c10::StreamId, DEVICES> streams{};
inline std::atomic<c10::StreamId> last_stream{0};

/* Streams are numbers and events nothing: an operation is done when it has been launched. */
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::kPrivateUse1; }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

    c10::Device getDevice() const override { return device(current); }
    c10::Device exchangeDevice(c10::Device to) const override { return device(exchange(to.index())); }
    void setDevice(c10::Device to) const override { exchange(to.index()); }
    void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }

    static c10::Stream stream(c10::Device on, c10::StreamId id)
    {
        const auto index = on.has_index() ? on.index() : current;
        return c10::Stream(c10::Stream::UNSAFE, device(index), id);
    }
    c10::Stream getStream(c10::Device on) const override
    {
        return stream(on, streams[on.has_index() ? on.index() : current]);
    }
    c10::Stream getDefaultStream(c10::Device on) const override { return stream(on, 0); }
    c10::Stream getStreamFromGlobalPool(c10::Device on, bool) const override
    {
        return stream(on, ++last_stream);
    }
    c10::Stream getNewStream(c10::Device on, int) const override { return stream(on, ++last_stream); }
    c10::Stream exchangeStream(c10::Stream to) const override
    {
        return stream(to.device(), std::exchange(streams[to.device_index()], to.id()));
    }
    void* getStreamNativeHandle(const c10::Stream stream) const
    {
        return reinterpret_cast<void*>(stream.id());
    }
    bool queryStream(const c10::Stream&) const override { return done(); }
    // torch 2.11 does not ask this, so it overrides nothing there.
    bool isStreamCapturing(const c10::Stream&) const { return bool(capturing); }
    void synchronizeStream(const c10::Stream&) const override { read("Stream.synchronize"); }
    void synchronizeDevice(const c10::DeviceIndex) const override { read("synchronize"); }

    static bool done()
    {
        land();
        return true;
    }
    void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override
    {
        static int recorded;
        *event = &recorded;
    }
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return done(); }
    void synchronizeEvent(void*) const override { read("Event.synchronize"); }
    double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};

/* Draws what the CPU draws with the same seed. */
struct Generator final : c10::GeneratorImpl {
    explicit Generator(c10::DeviceIndex index)
        : GeneratorImpl(fake::device(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          host(at::detail::createCPUGenerator())
    {
    }
    at::Generator host;

    void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
    void set_offset(uint64_t offset) override { host.set_offset(offset); }
    uint64_t get_offset() const override { return host.get_offset(); }
    uint64_t current_seed() const override { return host.current_seed(); }
    uint64_t seed() override { return host.seed(); }
    void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override
    {
        return host.unsafeGetGeneratorImpl()->get_state();
    }

private:
    Generator* clone_impl() const override
    {
        auto* same = new Generator(device_.index());
        same->host = host.clone();
        return same;
    }
};

inline const at::Generator& default_generator(c10::DeviceIndex index)
{
    static const auto& all = *new std::array<at::Generator, DEVICES>{
        at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    return all[index < 0 ? current : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return DEVICES; }
    void setCurrentDevice(c10::DeviceIndex index) const override { exchange(index); }
    c10::DeviceIndex getCurrentDevice() const override { return current; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange(index); }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override
    {
        return index < 0 ? current : exchange(index);
    }
    bool isPinnedPtr(const void* place) const override { return is_pinned(place); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
    c10::Device getDeviceFromPtr(void* place) const override
    {
        c10::DeviceIndex owner;
        TORCH_CHECK(memory().find(place, &owner) && owner != PINNED, "This is no address of the device's memory.");
        return device(owner);
    }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override
    {
        return default_generator(index);
    }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override
    {
        return at::make_generator<Generator>(index < 0 ? current : index);
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override
    {
        const c10::DeviceGuard guard(storage.device());
        at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
    }
};

}  // namespace fake
