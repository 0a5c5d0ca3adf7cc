// Ctrl-C and other signals while a search runs with Python's lock released.
#pragma once

#include <pybind11/pybind11.h>

#include "search/clock.h"

namespace mosaic::search {

// Python notes a signal, and raises what follows from it when it is asked: KeyboardInterrupt, for Ctrl-C, unless a
// handler makes a stop of it.
inline Wish ask_python(const pybind11::object* should_stop) {
    const pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) return Wish::interrupt;
    try {
        const bool is_asked = should_stop != nullptr && !should_stop->is_none();
        return is_asked && (*should_stop)().cast<bool>() ? Wish::stop : Wish::go_on;
    } catch (pybind11::error_already_set& error) {
        error.restore();
        return Wish::interrupt;
    }
}

template <typename Work>
auto until_signalled(const pybind11::object* should_stop, Work work) {
    try {
        const Watch watch([&] { return ask_python(should_stop); });
        return work();
    } catch (const Interrupted&) {
        const pybind11::gil_scoped_acquire gil;
        throw pybind11::error_already_set();
    }
}

}  // namespace mosaic::search
