// The Python face of csrc/search/pipeline.
#pragma once

#include <pybind11/pybind11.h>

void bind_orders(pybind11::module_& module);
