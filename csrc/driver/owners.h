// Move-only owners of driver objects: one owner an object, released once, in a destructor that cannot throw.
//
// Members are destroyed in reverse order of declaration, so an object that holds several declares them
// primary context, then green contexts, then streams: streams die first, which the driver asks for.
#pragma once

#include <optional>

#include "driver.h"

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
    // Releases now, and says what went wrong if it did. A second call does nothing.
    void close();

  private:
    std::optional<CUdevice> device_;
};

}  // namespace mosaic
