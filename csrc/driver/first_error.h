// Ends many things although some fail, and tells the first failure.
#pragma once

#include <exception>

namespace mosaic {

class FirstError {
  public:
    // Runs the action; of what it throws, only the first is kept.
    template <typename Action>
    void run(Action&& action) noexcept {
        try {
            action();
        } catch (...) {
            if (!error_) error_ = std::current_exception();
        }
    }
    void rethrow() const {
        if (error_) std::rethrow_exception(error_);
    }

  private:
    std::exception_ptr error_;
};

}  // namespace mosaic
