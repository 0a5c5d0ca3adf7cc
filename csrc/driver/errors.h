// What can go wrong with the driver. Wrong arguments are std::invalid_argument.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace mosaic {

// A driver call returned something else than CUDA_SUCCESS, or broke a rule that its documentation states.
class CudaError : public std::runtime_error {
  public:
    CudaError(const std::string& message, std::string call, std::string status)
        : std::runtime_error(message), call_(std::move(call)), status_(std::move(status)) {}
    const std::string& call() const { return call_; }
    const std::string& status() const { return status_; }

  private:
    std::string call_;
    std::string status_;
};

// There is no driver, no device, or the driver is too old for what was asked.
class Unavailable : public std::runtime_error {
  public:
    Unavailable(const std::string& message, std::string found, std::string needed)
        : std::runtime_error(message), found_(std::move(found)), needed_(std::move(needed)) {}
    const std::string& found() const { return found_; }
    const std::string& needed() const { return needed_; }

  private:
    std::string found_;
    std::string needed_;
};

}  // namespace mosaic
