// Which process an object belongs to: a forked child has copies of its parent's objects and no driver behind
// them, so there they are neither used nor ended.
#pragma once

namespace mosaic {

// Grows in a child at each fork; equal values mean the same process.
unsigned process_generation() noexcept;

// The process that an object was made in. Copied and moved along with the object.
class Origin {
  public:
    Origin() noexcept : generation_(process_generation()) {}

    bool is_here() const noexcept { return generation_ == process_generation(); }
    // Throws Unavailable in a forked child.
    void require_here(const char* what) const;

  private:
    unsigned generation_;
};

}  // namespace mosaic
