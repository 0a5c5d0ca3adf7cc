// Adds layer tuning to the extension `mosaic._search`.
#pragma once

#include <pybind11/pybind11.h>

void bind_tuning(pybind11::module_& module);
