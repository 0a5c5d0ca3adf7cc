// Move-only owners of driver objects: one owner an object, released once, in a destructor that cannot throw.
//
// Members are destroyed in reverse order of declaration, so an object that holds several declares them
// primary context, then green contexts, then streams: streams die first, which the driver asks for.
#pragma once

#include <optional>
#include <utility>

#include "driver.h"
#include "process.h"

namespace mosaic {

// Keeps a device's primary context alive, the one that torch uses too.
class PrimaryContext {
  public:
    explicit PrimaryContext(CUdevice device);
    ~PrimaryContext() noexcept;
    PrimaryContext(PrimaryContext&& other) noexcept;
    PrimaryContext& operator=(PrimaryContext&& other) noexcept;
    PrimaryContext(const PrimaryContext&) = delete;
    PrimaryContext& operator=(const PrimaryContext&) = delete;

    bool held() const { return device_.has_value(); }
    CUcontext handle() const { return context_; }
    // Releases now, and says what went wrong if it did. A second call does nothing.
    void close();

  private:
    Origin origin_;
    std::optional<CUdevice> device_;
    CUcontext context_ = nullptr;
};

// Makes the primary context current to this thread until it is closed or destroyed.
class CurrentContext {
  public:
    explicit CurrentContext(const PrimaryContext& primary);
    ~CurrentContext() noexcept;
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;

    void close();

  private:
    bool pushed_ = false;
};

// X(name, handle, end): an object that one driver call ends.
// clang-format off
#define MOSAIC_OWNED_OBJECTS(X)                  \
    X(GreenContext, CUgreenCtx, cuGreenCtxDestroy) \
    X(Stream, CUstream, cuStreamDestroy)         \
    X(Library, CUlibrary, cuLibraryUnload)       \
    X(DeviceMemory, CUdeviceptr, cuMemFree)
// clang-format on

// The one owner of a driver object, by its handle.
template <typename Kind>
class Owner {
  public:
    using Handle = typename Kind::Handle;

    // Takes over a handle that the driver has just given out.
    explicit Owner(Handle handle) noexcept : handle_(handle) {}
    ~Owner() noexcept {
        // Nobody is left to hear of a failure; at process exit the driver may be gone already.
        if (handle_ && origin_.is_here()) static_cast<void>(Kind::end(handle_));
    }
    Owner(Owner&& other) noexcept : origin_(other.origin_), handle_(std::exchange(other.handle_, Handle{})) {}
    Owner& operator=(Owner&& other) noexcept {
        std::swap(origin_, other.origin_);
        std::swap(handle_, other.handle_);
        return *this;
    }
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;

    Handle get() const noexcept { return handle_; }
    bool held() const noexcept { return handle_ != Handle{}; }
    // Ends it now, and says what went wrong if it did. A second call does nothing.
    void close() {
        if (!held()) return;
        origin_.require_here("this driver object");
        // Given up before the call: an end that failed is not tried again by the destructor.
        const CUresult status = Kind::end(std::exchange(handle_, Handle{}));
        if (status != CUDA_SUCCESS) throw_cuda_error(driver().functions(), Kind::kEnd, status);
    }

  private:
    Origin origin_;
    Handle handle_;
};

#define MOSAIC_OWNER(name, handle, ending)                                                          \
    struct name##Kind {                                                                             \
        using Handle = handle;                                                                      \
        static constexpr const char* kEnd = #ending;                                                \
        static CUresult end(Handle object) noexcept { return driver().functions().ending(object); } \
    };                                                                                              \
    using name = Owner<name##Kind>;
MOSAIC_OWNED_OBJECTS(MOSAIC_OWNER)
#undef MOSAIC_OWNER

// A green context on the SMs of a descriptor. Does not become current.
GreenContext make_green_context(CUdevResourceDesc sms, CUdevice device);
// A non-blocking stream whose kernels run on the context's SMs, whatever context is current.
Stream make_stream(const GreenContext& context);

}  // namespace mosaic
