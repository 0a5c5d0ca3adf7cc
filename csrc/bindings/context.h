// Adds masks of long sequences to the extension `mosaic._search`.
#pragma once

#include <pybind11/pybind11.h>

void bind_context(pybind11::module_& module);
