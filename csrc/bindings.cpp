// The Python face of csrc/driver: names, and the way errors become exceptions. No logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "driver/owners.h"
#include "driver/slots.h"

namespace py = pybind11;
using namespace mosaic;

namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// Looks the class up at each raise: a class kept in a static object would be released after the interpreter.
void raise(const char* name, const char* message, const char* first, const std::string& first_value, const char* second,
           const std::string& second_value) {
    try {
        const py::object type = py::module_::import("mosaic.errors").attr(name);
        py::dict details;
        details[first] = first_value;
        details[second] = second_value;
        PyErr_SetObject(type.ptr(), type(message, **details).ptr());
    } catch (py::error_already_set& error) {
        error.restore();
    }
}

void translate(std::exception_ptr raised) {
    try {
        if (raised) std::rethrow_exception(raised);
    } catch (const CudaError& error) {
        raise("CudaError", error.what(), "call", error.call(), "status", error.status());
    } catch (const Unavailable& error) {
        raise("BackendUnavailableError", error.what(), "found", error.found(), "needed", error.needed());
    }
}

const char* use_text(const DriverFunction& function) {
    switch (function.use) {
        case Use::base:
            return "base";
        case Use::slots:
            return "slots";
        case Use::streams:
            return "streams";
        case Use::placement:
            break;
    }
    return "placement";
}

void bind_driver(py::module_& module) {
    py::class_<DriverFunction>(module, "DriverFunction", "A function of the CUDA driver that Mosaic calls.")
        .def_readonly("name", &DriverFunction::name)
        .def_readonly("since", &DriverFunction::since, "1000 * major + 10 * minor of the CUDA that brought it.")
        .def_property_readonly("use", &use_text, "'base', 'slots', 'streams' or 'placement'.");
    module.def(
        "driver_version", [] { return driver().version(); }, ReleaseGil(),
        "CUDA version of the driver, 1000 * major + 10 * minor.");
    module.def(
        "missing_functions", [] { return driver().missing(); }, ReleaseGil(),
        "Functions that Mosaic calls and this driver does not have.");
    module.def("device_count", &device_count, ReleaseGil(), "Number of devices that the driver offers.");
}

void bind_device(py::module_& module) {
    py::class_<Device>(module, "Device", "One CUDA device, as the driver describes it.")
        .def(py::init<int>(), py::arg("ordinal"), ReleaseGil())
        .def_property_readonly("ordinal", &Device::ordinal)
        .def_property_readonly("name", &Device::name)
        .def_property_readonly("uuid", &Device::uuid)
        .def_property_readonly("compute_capability", &Device::compute_capability)
        .def_property_readonly("num_sms", &Device::num_sms)
        .def_property_readonly("total_memory_bytes", &Device::total_memory_bytes)
        .def_property_readonly("min_sm_partition_size", py::cpp_function(&Device::min_sm_partition_size, ReleaseGil()))
        .def_property_readonly("sm_coscheduled_alignment",
                               py::cpp_function(&Device::sm_coscheduled_alignment, ReleaseGil()));
    py::class_<PrimaryContext>(module, "PrimaryContext", py::release_gil_before_calling_cpp_dtor(),
                               "Keeps a device's primary context alive.")
        .def(py::init([](const Device& device) { return PrimaryContext(device.handle()); }), py::arg("device"),
             ReleaseGil())
        .def_property_readonly("held", &PrimaryContext::held)
        .def("close", &PrimaryContext::close, ReleaseGil());
}

void bind_slots(py::module_& module) {
    py::class_<SlotSet>(module, "SlotSet", "Slots of one split: what a partition is made of.")
        .def_readonly("slots", &SlotSet::slots)
        .def_readonly("num_sms", &SlotSet::num_sms);
    py::class_<SlotSplit>(module, "SlotSplit", "One split of a device into equal slots and a remainder.")
        .def(py::init<const Device&, bool>(), py::arg("device"), py::arg("fine") = false, ReleaseGil())
        .def_property_readonly("fine", &SlotSplit::fine)
        .def_property_readonly("num_slots", &SlotSplit::num_slots)
        .def_property_readonly("sms_per_slot", &SlotSplit::sms_per_slot)
        .def_property_readonly("remainder_sms", &SlotSplit::remainder_sms)
        .def_property_readonly("granted_sms", &SlotSplit::granted_sms)
        .def("select", &SlotSplit::select, py::arg("slots"));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
    module.doc() = "The green-context runtime: CUDA's driver, its devices and their slots.";
    py::register_local_exception_translator(&translate);
    bind_driver(module);
    bind_device(module);
    bind_slots(module);
}
