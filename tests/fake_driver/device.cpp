// Start-up, devices and primary contexts.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <thread>

#include "state.h"

namespace fake {
namespace {

std::string variable(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value ? value : otherwise;
}

std::vector<std::string> parts(const std::string& text, char separator) {
    std::vector<std::string> all;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) all.push_back(part);
    return all;
}

}  // namespace

State::State() : version(std::stoi(variable("MOSAIC_FAKE_VERSION", "13000"))) {
    for (const std::string& device : parts(variable("MOSAIC_FAKE_DEVICES", "132:9.0"), ',')) {
        const auto colon = device.find(':');
        const auto dot = device.find('.');
        devices.push_back({static_cast<unsigned>(std::stoul(device.substr(0, colon))),
                           std::stoi(device.substr(colon + 1)), std::stoi(device.substr(dot + 1))});
    }
    for (const std::string& failure : parts(variable("MOSAIC_FAKE_FAIL", ""), ',')) {
        const auto equals = failure.find('=');
        failures[failure.substr(0, equals)] = {std::stoi(failure.substr(equals + 1)), 0};
    }
    for (const std::string& sms : parts(variable("MOSAIC_FAKE_CLUSTERS", ""), ',')) {
        clusters.push_back(static_cast<unsigned>(std::stoul(sms)));
    }
    first_current = std::stoi(variable("MOSAIC_FAKE_CURRENT", "-1"));
    quirk = variable("MOSAIC_FAKE_QUIRK", "");
    report = variable("MOSAIC_FAKE_REPORT", "");
}

State& state() {
    static State* const instance = new State();
    return *instance;
}

// "This leaves the process in an inconsistent state and any further CUDA work will return the same error. To continue
// using CUDA, the process must be terminated and relaunched" (cuda.h, CUDA_ERROR_ILLEGAL_ADDRESS and its like).
bool is_sticky(Result status) { return status == kIllegalAddress; }

Result enter(const char* name) {
    static const std::set<std::string> before_init = {"cuInit", "cuDriverGetVersion", "cuGetProcAddress",
                                                      "cuGetErrorName", "cuGetErrorString"};
    State& now = state();
    const int call = ++now.calls[name];
    if (now.logging) now.log += std::string(name) + " ";
    const auto failure = now.failures.find(name);
    if (failure != now.failures.end() && (failure->second.nth == 0 || failure->second.nth == call)) {
        if (is_sticky(failure->second.status)) now.sticky = failure->second.status;
        return failure->second.status;
    }
    if (now.sticky != kSuccess && before_init.count(name) == 0) return now.sticky;
    if (now.ended && std::strncmp(name, "cuGetError", 10) != 0) return kDeinitialized;
    if (now.initialised && now.process != getpid()) {  // a forked child has no driver
        ++now.misused["call_in_a_forked_child"];
        return kNotInitialized;
    }
    return now.initialised || before_init.count(name) ? kSuccess : kNotInitialized;
}

void wait_if_held(const char* name) {
    State& now = state();
    if (!now.holding || now.held != name) return;
    ++now.num_waiting;
    while (now.holding) std::this_thread::yield();
    --now.num_waiting;
}

Result misuse(const char* what, Result status) {
    ++state().misused[what];
    return status;
}

namespace {

Result cuInit(unsigned flags) {
    FAKE_ENTER("cuInit");
    if (flags != 0) return kInvalidValue;
    if (state().devices.empty()) return kNoDevice;
    const int first = state().first_current;
    if (!state().initialised && state().has(first) && state().primary_references[first]++ == 0) {
        ++state().created["primary"];  // torch's hold on it
    }
    state().initialised = true;
    state().process = getpid();
    return kSuccess;
}

Result cuDriverGetVersion(int* version) {
    FAKE_ENTER("cuDriverGetVersion");
    *version = state().version;
    return kSuccess;
}

Result cuGetErrorName(Result status, const char** text) {
    static const std::map<Result, const char*> names = {
        {kSuccess, "CUDA_SUCCESS"},
        {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
        {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
        {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
        {kDeinitialized, "CUDA_ERROR_DEINITIALIZED"},
        {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
        {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
        {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
        {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
        {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
        {kNotFound, "CUDA_ERROR_NOT_FOUND"},
        {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
        {kSystemDriverMismatch, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
        {kInvalidResourceType, "CUDA_ERROR_INVALID_RESOURCE_TYPE"},
        {kInvalidResourceConfiguration, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"},
        {kUnknown, "CUDA_ERROR_UNKNOWN"},
    };
    FAKE_ENTER("cuGetErrorName");
    const auto found = names.find(status);
    *text = found == names.end() ? nullptr : found->second;
    return found == names.end() ? kInvalidValue : kSuccess;
}

Result cuGetErrorString(Result, const char** text) {
    FAKE_ENTER("cuGetErrorString");
    *text = "told to fail by the fake driver";
    return kSuccess;
}

Result cuDeviceGetCount(int* count) {
    FAKE_ENTER("cuDeviceGetCount");
    *count = static_cast<int>(state().devices.size());
    return kSuccess;
}

Result cuDeviceGet(int* device, int ordinal) {
    FAKE_ENTER("cuDeviceGet");
    if (!state().has(ordinal)) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
}

Result cuDeviceGetName(char* name, int length, int device) {
    FAKE_ENTER("cuDeviceGetName");
    if (!state().has(device)) return kInvalidDevice;
    std::strncpy(name, "Fake GPU", static_cast<std::size_t>(length));
    return kSuccess;
}

Result cuDeviceGetUuid(unsigned char* uuid, int device) {
    FAKE_ENTER("cuDeviceGetUuid");
    if (!state().has(device)) return kInvalidDevice;
    for (int byte = 0; byte < 16; ++byte) uuid[byte] = static_cast<unsigned char>(16 * byte + device);
    return kSuccess;
}

Result cuDeviceGetAttribute(int* value, int attribute, int device) {
    FAKE_ENTER("cuDeviceGetAttribute");
    if (!state().has(device)) return kInvalidDevice;
    const FakeDevice& asked = state().devices[static_cast<std::size_t>(device)];
    if (attribute == kAttributeMultiprocessorCount)
        *value = static_cast<int>(asked.num_sms);
    else if (attribute == kAttributeMajor)
        *value = asked.major;
    else if (attribute == kAttributeMinor)
        *value = asked.minor;
    else
        return kInvalidValue;
    return kSuccess;
}

Result cuDeviceTotalMem(std::size_t* bytes, int device) {
    FAKE_ENTER("cuDeviceTotalMem");
    if (!state().has(device)) return kInvalidDevice;
    *bytes = std::size_t{80} << 30;
    return kSuccess;
}

Result cuDevicePrimaryCtxRetain(void** context, int device) {
    FAKE_ENTER("cuDevicePrimaryCtxRetain");
    if (!state().has(device)) return kInvalidDevice;
    int& references = state().primary_references[device];
    if (references++ == 0) ++state().created["primary"];
    *context = &references;
    return kSuccess;
}

Result cuDevicePrimaryCtxRelease(int device) {
    FAKE_ENTER("cuDevicePrimaryCtxRelease");
    if (!state().has(device)) return kInvalidDevice;
    int& references = state().primary_references[device];
    if (references == 0) return misuse("primary_released_too_often", kInvalidContext);
    if (--references == 0) ++state().destroyed["primary"];
    return kSuccess;
}

}  // namespace

const std::vector<Function>& device_functions() {
    static const std::vector<Function> functions = {
        {"cuInit", 2000, address_of(&cuInit)},
        {"cuDriverGetVersion", 2020, address_of(&cuDriverGetVersion)},
        {"cuGetErrorName", 6000, address_of(&cuGetErrorName)},
        {"cuGetErrorString", 6000, address_of(&cuGetErrorString)},
        {"cuDeviceGetCount", 2000, address_of(&cuDeviceGetCount)},
        {"cuDeviceGet", 2000, address_of(&cuDeviceGet)},
        {"cuDeviceGetName", 2000, address_of(&cuDeviceGetName)},
        {"cuDeviceGetUuid", 11040, address_of(&cuDeviceGetUuid)},
        {"cuDeviceGetAttribute", 2000, address_of(&cuDeviceGetAttribute)},
        {"cuDeviceTotalMem", 3020, address_of(&cuDeviceTotalMem)},
        {"cuDevicePrimaryCtxRetain", 7000, address_of(&cuDevicePrimaryCtxRetain)},
        {"cuDevicePrimaryCtxRelease", 11000, address_of(&cuDevicePrimaryCtxRelease)},
    };
    return functions;
}

}  // namespace fake
