/* Memory of the device and pinned memory: both are the host's, at addresses of their own. */
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace fake {

constexpr c10::DeviceIndex DEVICES = 2;
constexpr c10::DeviceIndex PINNED = -1;  // the owner of pinned memory
constexpr size_t ALIGNMENT = 512;        // that of CUDA's caching allocator
constexpr int GARBAGE = 0xFF;            // NaN in every floating dtype, -1 in integers

inline thread_local c10::DeviceIndex current = 0;

struct Block {
    size_t bytes;
    c10::DeviceIndex owner;
    bool used = true;
    bool held = false;  // by a graph, or by a copy that may not be done: not to be handed out again
};

/* Blocks are kept and handed out again, the one freed last first, as CUDA's caching allocator does.
   Fresh and freed memory is full of garbage. */
class Memory {
public:
    void* take(size_t bytes, c10::DeviceIndex owner)
    {
        if (!bytes) return nullptr;
        const std::lock_guard<std::mutex> lock(mutex_);
        const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        auto& free = free_[{owner, rounded}];
        void* found;
        if (holding_ && owner != PINNED) {  // a graph's memory is its own
            found = fresh(rounded, owner);
            blocks_.at(found).held = true;
            holding_->push_back(found);
        } else if (free.empty()) {
            found = fresh(rounded, owner);
        } else {
            found = free.back();
            free.pop_back();
            blocks_.at(found).used = true;
        }
        return found;
    }

    void give_back(void* place)
    {
        if (!place) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        Block& block = blocks_.at(place);
        block.used = false;
        if (!block.held) hand_out(place, block);
    }

    /* Who owns the memory at an address; nothing found: false. */
    bool find(const void* place, c10::DeviceIndex* owner)
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = containing(place);
        if (found == blocks_.end()) return false;
        if (!found->second.used && !found->second.held) return false;
        *owner = found->second.owner;
        return true;
    }

    /* From now on, all memory that the device hands out is held and noted in `holding`. */
    void hold_all(std::vector<void*>* holding) { holding_ = holding; }

    /* Holds the block that an address lies in, if it is not held yet. */
    void* hold(const void* place)
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = containing(place);
        if (found == blocks_.end() || found->second.held) return nullptr;
        found->second.held = true;
        return found->first;
    }

    void let_go(const std::vector<void*>& held)
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (void* place : held) {
            Block& block = blocks_.at(place);
            block.held = false;
            if (!block.used) hand_out(place, block);
        }
    }

    using Contents = std::vector<std::pair<void*, std::vector<char>>>;

    Contents contents()
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        Contents all;
        for (auto& [place, block] : blocks_) {
            const char* first = static_cast<const char*>(place);
            if (block.used && block.owner != PINNED)  // what the host writes is not recorded
                all.emplace_back(place, std::vector<char>(first, first + block.bytes));
        }
        return all;
    }

    /* Puts back what was in the memory that is still in use. */
    void restore(const Contents& all)
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto& [place, bytes] : all)
            if (blocks_.at(place).used) std::memcpy(place, bytes.data(), bytes.size());
    }

private:
    std::map<void*, Block, std::less<void*>>::iterator containing(const void* place)
    {
        auto after = blocks_.upper_bound(const_cast<void*>(place));
        if (after == blocks_.begin()) return blocks_.end();
        const auto found = std::prev(after);
        const auto distance = static_cast<const char*>(place) - static_cast<const char*>(found->first);
        return static_cast<size_t>(distance) < found->second.bytes ? found : blocks_.end();
    }

    void* fresh(size_t bytes, c10::DeviceIndex owner)
    {
        void* made = std::aligned_alloc(ALIGNMENT, bytes);
        TORCH_CHECK(made, "No memory is left for ", bytes, " bytes of the device.");
        std::memset(made, GARBAGE, bytes);
        blocks_.emplace(made, Block{bytes, owner});
        return made;
    }

    void hand_out(void* place, Block& block)
    {
        std::memset(place, GARBAGE, block.bytes);
        free_[{block.owner, block.bytes}].push_back(place);
    }

    std::mutex mutex_;
    std::map<void*, Block, std::less<void*>> blocks_;
    std::map<std::pair<c10::DeviceIndex, size_t>, std::vector<void*>> free_;
    std::vector<void*>* holding_ = nullptr;
};

/* Never destroyed: tensors may outlive everything else of a process. */
inline Memory& memory()
{
    static Memory& all = *new Memory;
    return all;
}

inline void give_back(void* place) { memory().give_back(place); }

template <bool pinned>
struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        void* place = memory().take(bytes, pinned ? PINNED : current);
        return {place, place, &give_back, pinned ? c10::Device(c10::kCPU) : c10::Device(c10::kPrivateUse1, current)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

inline c10::Allocator& device_allocator()
{
    static auto& only = *new Allocator<false>;
    return only;
}

inline c10::Allocator& pinned_allocator()
{
    static auto& only = *new Allocator<true>;
    return only;
}

inline bool is_pinned(const void* place)
{
    c10::DeviceIndex owner;
    return memory().find(place, &owner) && owner == PINNED;
}

}  // namespace fake
