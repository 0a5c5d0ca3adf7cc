#include "process.h"

#include <pthread.h>

#include <atomic>
#include <string>

#include "errors.h"

namespace mosaic {
namespace {

std::atomic<unsigned> generation{0};

void enter_child() { generation.fetch_add(1, std::memory_order_relaxed); }

// Once, when the extension is loaded: a fork before that has nothing of ours to copy.
const int kRegistered = pthread_atfork(nullptr, nullptr, &enter_child);

}  // namespace

unsigned process_generation() noexcept { return generation.load(std::memory_order_relaxed); }

void Origin::require_here(const char* what) const {
    if (is_here()) return;
    static_cast<void>(kRegistered);
    throw Unavailable(std::string(what) + " belongs to the parent process", "a forked child without a CUDA driver",
                      "a pool created in a child whose parent had not used CUDA: start the child with "
                      "multiprocessing's 'spawn', or fork before the first use of CUDA");
}

}  // namespace mosaic
