// The fake's state: what it was told to be, what it counts, and what lives in it.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
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
    bool alive = true;
};

struct Stream {
    GreenContext* context;
    int priority;
    bool alive = true;
};

struct State {
    State();

    // Told by environment variables, read once.
    int version = 13000;                      // MOSAIC_FAKE_VERSION
    std::vector<FakeDevice> devices;          // MOSAIC_FAKE_DEVICES=132:9.0,108:8.0
    std::map<std::string, Failure> failures;  // MOSAIC_FAKE_FAIL=cuDeviceGet=101,cuGreenCtxCreate@2=2
    std::string quirk;                        // MOSAIC_FAKE_QUIRK: a driver that breaks a rule, see split.cpp

    std::mutex mutex;
    bool initialised = false;
    std::map<std::string, int> calls;
    std::map<std::string, int> created;
    std::map<std::string, int> destroyed;
    std::map<int, int> primary_references;
    std::uint64_t last_split = 0;
    // Never freed, so that a stale handle is recognised and not followed into freed memory.
    std::vector<std::unique_ptr<Descriptor>> descriptors;
    std::vector<std::unique_ptr<GreenContext>> contexts;
    std::vector<std::unique_ptr<Stream>> streams;

    bool has(int device) const { return device >= 0 && device < static_cast<int>(devices.size()); }
};

State& state();

// Counts the call; returns the failure injected for it, or kNotInitialized before cuInit.
Result enter(const char* name);

struct Function {
    const char* name;
    int since;
    void* address;
};
const std::vector<Function>& device_functions();
const std::vector<Function>& split_functions();
const std::vector<Function>& green_functions();

// Fills in an SM resource as the driver's own queries do.
void describe_sms(Resource* out, int device, const std::vector<unsigned>& sms);

// Finds a live or dead object by its handle; null for a handle that was never given out.
template <typename T>
T* find(const std::vector<std::unique_ptr<T>>& all, void* handle) {
    for (const auto& one : all) {
        if (one.get() == handle) return one.get();
    }
    return nullptr;
}

template <typename F>
void* address_of(F* function) {
    return reinterpret_cast<void*>(function);
}

}  // namespace fake

// First line of every driver function.
#define FAKE_ENTER(name)                                            \
    const std::lock_guard<std::mutex> guard(::fake::state().mutex); \
    if (const ::fake::Result injected = ::fake::enter(name)) return injected
