// The CUDA driver of this machine: found at run time, never linked.
#pragma once

#include <string>
#include <vector>

#include "errors.h"
#include "functions.h"

namespace mosaic {

class Driver {
  public:
    // Opens libcuda.so.1 and looks every function up. Throws Unavailable if there is no usable driver.
    Driver();

    int version() const { return version_; }
    const Functions& functions() const { return functions_; }
    // Functions of the list that this driver does not have, in the list's order.
    const std::vector<DriverFunction>& missing() const { return missing_; }

  private:
    int version_ = 0;
    Functions functions_;
    std::vector<DriverFunction> missing_;
};

// The process's driver, opened at the first call and never closed, so that owners may die late. A failed
// attempt is not remembered: the next call tries again. Thread-safe.
const Driver& driver();

// Calls cuInit, which is cheap when repeated. Throws Unavailable where there is no device to use, and in a
// process that was forked from one that had called it.
void initialise();

// 12040 -> "12.4".
std::string version_text(int version);

[[noreturn]] void throw_cuda_error(const Functions& functions, const char* call, CUresult status);
[[noreturn]] void throw_missing(const char* call);
// For a driver that answered CUDA_SUCCESS and yet broke a rule of its documentation.
[[noreturn]] void throw_broken(const char* call, const std::string& what);

// Whether the error says that the driver has ended, as it does at process exit: then nothing is left to be ended.
bool driver_has_ended(const CudaError& error);

// Calls a driver function and turns a bad status or a null pointer into an exception.
template <typename Function, typename... Arguments>
void checked_call(const char* name, Function function, Arguments... arguments) {
    if (function == nullptr) throw_missing(name);
    const CUresult status = function(arguments...);
    if (status != CUDA_SUCCESS) throw_cuda_error(driver().functions(), name, status);
}

}  // namespace mosaic

// MOSAIC_CALL(cuDeviceGet, &device, 0): the function's plain name goes into the error.
#define MOSAIC_CALL(name, ...) ::mosaic::checked_call(#name, ::mosaic::driver().functions().name, __VA_ARGS__)
