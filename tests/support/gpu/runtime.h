/* What torch asks of a device beside operations. */
#pragma once

#include "events.h"

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

/* There is one stream, and events are nothing: an operation is done when it has been launched. */
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::kPrivateUse1; }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

    c10::Device getDevice() const override { return device(current); }
    c10::Device exchangeDevice(c10::Device to) const override { return device(exchange(to.index())); }
    void setDevice(c10::Device to) const override { exchange(to.index()); }
    void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }

    static c10::Stream stream(c10::Device on)
    {
        return c10::Stream(c10::Stream::UNSAFE, device(on.has_index() ? on.index() : current), 0);
    }
    c10::Stream getStream(c10::Device on) const override { return stream(on); }
    c10::Stream getDefaultStream(c10::Device on) const override { return stream(on); }
    c10::Stream exchangeStream(c10::Stream to) const override { return stream(to.device()); }
    // torch 2.11 does not ask this, so it overrides nothing there.
    bool isStreamCapturing(const c10::Stream&) const { return bool(capturing); }
    void synchronizeStream(const c10::Stream&) const override { read("Stream.synchronize"); }
    void synchronizeDevice(const c10::DeviceIndex) const override { read("synchronize"); }
    void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override
    {
        static int recorded;
        *event = &recorded;
    }
    void block(void*, const c10::Stream&) const override {}
};

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
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override
    {
        const c10::DeviceGuard guard(storage.device());
        at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
    }
};

}  // namespace fake
