// What tests tell the fake and ask of it, and its report at exit.
#include <fstream>

#include "state.h"

// For tests, through ctypes: injects a failure from now on (status 0 takes it back) or of the nth call from now, ends
// the driver as its own exit does, and tells how often a function was called, how many objects were made and ended,
// and what was misused.
extern "C" void mosaic_fake_fail(const char* name, int status) { fake::state().failures[name] = {status, 0}; }
extern "C" void mosaic_fake_fail_nth(const char* name, int status, int nth) {
    fake::state().failures[name] = {status, fake::state().calls[name] + nth};
}
extern "C" void mosaic_fake_end() { fake::state().ended = true; }
extern "C" int mosaic_fake_calls(const char* name) { return fake::state().calls[name]; }
extern "C" int mosaic_fake_created(const char* kind) { return fake::state().created[kind]; }
extern "C" int mosaic_fake_destroyed(const char* kind) { return fake::state().destroyed[kind]; }

namespace {

const char* joined(const std::map<std::string, int>& counts) {
    static std::string names;
    names.clear();
    for (const auto& count : counts) names += count.second > 0 ? count.first + " " : "";
    return names.c_str();
}

}  // namespace

// Lets calls of a function wait until they are let go, and tells how many do.
extern "C" void mosaic_fake_hold(const char* name) {
    fake::state().held = name;
    fake::state().holding = true;
}
extern "C" void mosaic_fake_let_go() { fake::state().holding = false; }
extern "C" int mosaic_fake_num_waiting() { return fake::state().num_waiting; }

// Writes down the calls from now on, in their order.
extern "C" void mosaic_fake_mark() {
    fake::state().logging = true;
    fake::state().log.clear();
}
extern "C" const char* mosaic_fake_log() { return fake::state().log.c_str(); }
extern "C" const char* mosaic_fake_called() { return joined(fake::state().calls); }
extern "C" const char* mosaic_fake_misused() { return joined(fake::state().misused); }

// The driver's own end: the last thing that happens to it in a process.
__attribute__((destructor)) static void end_and_report() {
    fake::State& state = fake::state();
    if (!state.report.empty()) {
        std::ofstream out(state.report, std::ios::app);
        for (const auto& [kind, count] : state.created) out << kind << " " << count - state.destroyed[kind] << "\n";
        for (const auto& [what, count] : state.misused) out << "misused " << what << " " << count << "\n";
    }
    state.ended = true;
}
