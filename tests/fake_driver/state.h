// The fake's state: what it was told to be, what it counts, and what lives in it.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "abi.h"

namespace fake {

struct FakeDevice {
    unsigned num_sms;
    int major;
    int minor;
};

// An injected failure: of every call of a function, or of its nth only.
struct Failure {
    Result status;
    int nth;  // 0: every call
};

struct Descriptor {
    int device;
    std::vector<unsigned> sms;
};

struct GreenContext {
    int device;
    std::vector<unsigned> sms;
    int num_streams = 0;
    bool alive = true;
};

// Work that was given to a stream runs when somebody waits for that stream, in the order in which it was given.
struct Stream {
    GreenContext* context;  // null for a device's legacy default stream
    int device;
    bool alive = true;
    int num_given = 0;
    int num_run = 0;
    std::deque<std::function<void()>> pending;
};

// What cuLibraryLoadData made, and the kernel in it; a kernel's handle is its library's.
struct Library {
    std::string code;
    bool alive = true;
};

struct Memory {
    std::vector<unsigned> words;
    bool alive = true;
};

// Objects by their handle. Never freed, so that a stale handle is recognised and not followed into freed memory.
template <typename T>
using Objects = std::unordered_map<void*, std::unique_ptr<T>>;

struct State {
    State();

    // Told by environment variables, read once.
    int version = 13000;                      // MOSAIC_FAKE_VERSION
    std::vector<FakeDevice> devices;          // MOSAIC_FAKE_DEVICES=132:9.0,108:8.0
    std::map<std::string, Failure> failures;  // MOSAIC_FAKE_FAIL=cuDeviceGet=101
    std::vector<unsigned> clusters;           // MOSAIC_FAKE_CLUSTERS=18,16,...: SMs of each GPC, see split.cpp
    int first_current = -1;                   // MOSAIC_FAKE_CURRENT=0: torch's device, see context.cpp
    std::string quirk;                        // MOSAIC_FAKE_QUIRK: a driver that breaks a rule, see split.cpp
    std::string report;                       // MOSAIC_FAKE_REPORT: a file for what was counted, written at exit

    // A call of this name waits until it is let go; for tests of locks.
    std::atomic<bool> holding{false};
    std::atomic<int> num_waiting{0};
    std::string held;

    std::mutex mutex;
    bool initialised = false;
    std::map<std::string, int> calls;
    std::map<std::string, int> created;
    std::map<std::string, int> destroyed;
    std::map<std::string, int> misused;  // what a caller that keeps the rules never does, by its name
    int process = 0;                     // that called cuInit; a forked child is another
    bool logging = false;
    std::string log;     // calls in their order, while logging
    bool ended = false;  // after the driver's own end at exit
    Result sticky = kSuccess;
    std::map<int, int> primary_references;
    std::map<int, std::size_t> used_bytes;  // by device
    std::uint64_t last_split = 0;
    Objects<Descriptor> descriptors;
    Objects<GreenContext> contexts;
    Objects<Stream> streams;
    std::map<int, Stream> default_streams;  // by device
    Objects<Library> libraries;
    Objects<Memory> memory;

    bool has(int device) const { return device >= 0 && device < static_cast<int>(devices.size()); }
};

State& state();

// Counts the call; returns the failure injected for it, or kNotInitialized before cuInit.
Result enter(const char* name);

// Waits while calls of this name are held; outside of the lock, so that other calls go on.
void wait_if_held(const char* name);

struct Function {
    const char* name;
    int since;
    void* address;
};
const std::vector<Function>& device_functions();
const std::vector<Function>& split_functions();
const std::vector<Function>& green_functions();
const std::vector<Function>& context_functions();
const std::vector<Function>& launch_functions();

// Fills in an SM resource as the driver's own queries do.
void describe_sms(Resource* out, int device, const std::vector<unsigned>& sms);

// Counts a misuse and passes the status on.
Result misuse(const char* what, Result status);

// Device of the context that is current to the calling thread; -1 if there is none.
int current_device();

// The stream of a handle, if work may be given to it or waited for from here; null is the legacy default stream.
Result find_stream(void* handle, Stream** stream);
void give(Stream& stream, std::function<void()> work);
// Runs what was given to the stream, up to a number of pieces counted from its beginning.
void run_pending(Stream& stream, int up_to);

// Keeps an object and returns its handle.
template <typename T>
T* keep(Objects<T>& all, std::unique_ptr<T> made) {
    T* handle = made.get();
    all.emplace(handle, std::move(made));
    return handle;
}

// Finds a live or dead object by its handle; null for a handle that was never given out.
template <typename T>
T* find(const Objects<T>& all, void* handle) {
    const auto found = all.find(handle);
    return found == all.end() ? nullptr : found->second.get();
}

template <typename F>
void* address_of(F* function) {
    return reinterpret_cast<void*>(function);
}

}  // namespace fake

// First line of every driver function.
#define FAKE_ENTER(name)                                            \
    ::fake::wait_if_held(name);                                     \
    const std::lock_guard<std::mutex> guard(::fake::state().mutex); \
    if (const ::fake::Result injected = ::fake::enter(name)) return injected
