/* What the device is asked to do: counted, logged, refused where the host would wait, recorded. */
#pragma once

#include "memory.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>

namespace fake {

struct Counters {
    std::atomic<int64_t> reads{0};       // the host waits for the device
    std::atomic<int64_t> uploads{0};     // host to device, and the host waits
    std::atomic<int64_t> pinned{0};      // host to device out of pinned memory; nobody waits
    std::atomic<int64_t> downloads{0};   // device to pinned memory; nobody waits
    std::atomic<int64_t> operations{0};  // launches
};

inline Counters counters;
inline std::atomic<bool> raising{false};
inline std::atomic<bool> logging{false};
inline std::mutex log_mutex;
inline std::vector<std::string> log;

/* Operations on fixed memory, which can be run again. What was allocated in between is kept. */
struct Graph {
    std::vector<std::pair<std::string, std::function<void()>>> steps;
    std::vector<void*> held;
    Memory::Contents before;

    ~Graph() { memory().let_go(held); }

    void add(std::string name, std::function<void()> step)
    {
        const std::lock_guard<std::mutex> lock(log_mutex);
        steps.emplace_back(std::move(name), std::move(step));
    }

    void replay()
    {
        for (auto& [name, step] : steps) step();
    }
};

inline std::shared_ptr<Graph> capturing;

inline void begin_capture()
{
    TORCH_CHECK(!capturing, "The device is capturing a graph already.");
    capturing = std::make_shared<Graph>();
    capturing->before = memory().contents();
    memory().hold_all(&capturing->held);
}

/* A capture has computed nothing: all memory that was there is as it was. */
inline std::shared_ptr<Graph> end_capture()
{
    TORCH_CHECK(capturing, "The device captures no graph.");
    memory().hold_all(nullptr);
    memory().restore(capturing->before);
    capturing->before.clear();
    return std::move(capturing);
}

inline void note(const std::string& name)
{
    if (!logging) return;
    const std::lock_guard<std::mutex> lock(log_mutex);
    log.push_back(name);
}

/* Copies out of pinned memory that may still be under way: a copy of what they copy, and their blocks,
   which are not handed out again until then. */
struct Flights {
    std::mutex mutex;
    std::vector<std::pair<const void*, std::vector<char>>> contents;
    std::vector<void*> held;
};
inline Flights flights;

inline void depart(const void* place, size_t bytes)
{
    if (capturing) return;
    const std::lock_guard<std::mutex> lock(flights.mutex);
    const char* first = static_cast<const char*>(place);
    flights.contents.emplace_back(place, std::vector<char>(first, first + bytes));
    if (void* block = memory().hold(place)) flights.held.push_back(block);
}

/* The host knows that all copies are done. */
inline void land()
{
    const std::lock_guard<std::mutex> lock(flights.mutex);
    bool same = true;
    for (auto& [place, bytes] : flights.contents)
        same = same && !std::memcmp(place, bytes.data(), bytes.size());
    flights.contents.clear();
    memory().let_go(std::exchange(flights.held, {}));
    TORCH_CHECK(
        same, "Pinned memory was written while a copy out of it may have been under way: the host must wait for "
        "the copy first, or take fresh memory.");
}

inline void refuse(const std::string& name, const char* what)
{
    TORCH_CHECK(!capturing, name, " ", what, ", which no graph can be captured with.");
    TORCH_CHECK(!raising, name, " ", what, ", which has been forbidden.");
}

inline void read(const std::string& name)
{
    refuse(name, "makes the host wait for the device");
    ++counters.reads;
    note(name);
    land();
}

inline void upload(const std::string& name)
{
    refuse(name, "copies from the host's memory, and the host waits");
    ++counters.uploads;
    note(name);
    land();
}

inline void launch(const std::string& name)
{
    ++counters.operations;
    note(name);
}

}  // namespace fake
