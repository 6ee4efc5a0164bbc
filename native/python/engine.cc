#include "python/engine.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/communicator.h"
#include "python/work.h"

namespace nb = nanobind;

namespace rallypoint::python {

void bind_engine(nb::module_& module) {
  module.def("region_bytes", [](std::uint32_t ranks) { return Layout(ranks).bytes(); });
  module.def("open_flight_record", [](int fd, std::uint64_t offset, const std::string& names) {
    return open_flight_record(fd, offset, names);
  });
  module.def("open_steps_page", []() -> nb::object {
    std::byte* const page = open_steps_page();
    if (page == nullptr) return nb::none();
    return nb::steal(
        PyMemoryView_FromMemory(reinterpret_cast<char*>(page), kRecordPage, PyBUF_WRITE));
  });
  module.def("tell_long_waits", &tell_long_waits);
  module.def("next_done", &next_done, nb::call_guard<WithoutGil>());
  module.def("close_work", &close_work);
  module.def("interrupted_frame", &interrupted_frame);
  nb::class_<PythonWork>(module, "Work")
      .def("wait", &PythonWork::wait)
      .def("test", &PythonWork::test)
      .def("end", &PythonWork::end)
      .def("watch", &PythonWork::watch)
      .def("peer", [](const PythonWork& work) {
        return work.transfer.peer == kAnyRank ? -1 : static_cast<int>(work.transfer.peer);
      });
  module.def("addresses_of", &addresses_of);
  nb::class_<PythonCommunicator>(module, "Communicator")
      .def(nb::init<int, std::uint32_t, std::uint32_t, unsigned, unsigned, nb::callable, double,
                    nb::callable, bool, const std::vector<FarPeer>&, const std::string&,
                    nb::callable, const std::optional<Mesh>&>(),
           nb::arg("fd"), nb::arg("rank"), nb::arg("ranks"), nb::arg("spins"), nb::arg("yields"),
           nb::arg("plan"), nb::arg("timeout_s"), nb::arg("is_alone"), nb::arg("synchronous_send"),
           nb::arg("peers"), nb::arg("description"), nb::arg("site"), nb::arg("mesh") = nb::none())
      .def("watch_peers", &PythonCommunicator::watch_peers)
      .def_prop_ro("begun", &PythonCommunicator::begun)
      .def("probe_memory", &PythonCommunicator::probe_memory)
      .def("set_reach", &PythonCommunicator::set_reach, nb::arg("reach"),
           nb::arg("knows_itself") = true)
      .def("read_memory", &PythonCommunicator::read_memory)
      .def(
          "run",
          [](PythonCommunicator& self, std::uint32_t collective, std::uint32_t op,
             std::uint32_t root, nb::handle input,
             nb::handle output) { return self.run(collective, op, root, input, output); },
          nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none())
      .def(
          "run_apart",
          [](PythonCommunicator& self, std::uint32_t collective, std::uint32_t op,
             std::uint32_t root, nb::handle input,
             nb::handle output) { return self.run_apart(collective, op, root, input, output); },
          nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none())
      .def("submit", &PythonCommunicator::submit, nb::arg("collective"), nb::arg("op"),
           nb::arg("root"), nb::arg("source").none(), nb::arg("target").none(),
           nb::arg("dtype") = -1, nb::arg("factor") = 1.0, nb::arg("uneven") = false,
           nb::arg("timeout_s") = -1.0, nb::arg("plain") = false, nb::arg("in_place") = false,
           nb::arg("waits") = false)
      .def("send", [](PythonCommunicator& self, std::uint32_t to, std::int32_t tag,
                      nb::handle buffer) { return self.send(to, tag, buffer); })
      .def("receive", [](PythonCommunicator& self, int from, std::int32_t tag,
                         nb::handle buffer) { return self.receive(from, tag, buffer); })
      .def("post", &PythonCommunicator::post, nb::arg("sends"), nb::arg("peer"), nb::arg("tag"),
           nb::arg("buffer"), nb::arg("dtype") = -1, nb::arg("timeout_s") = -1.0,
           nb::arg("plain") = false)
      .def("set_timeout", &PythonCommunicator::set_timeout)
      .def("hold", &PythonCommunicator::hold)
      .def("trouble", &PythonCommunicator::trouble)
      .def("leave", &PythonCommunicator::leave, nb::call_guard<WithoutGil>())
      .def("abort", &PythonCommunicator::abort)
      .def("revoke", &PythonCommunicator::revoke)
      .def("gone", &PythonCommunicator::gone)
      .def("end_calls", &PythonCommunicator::end_calls, nb::arg("most_s"),
           nb::call_guard<WithoutGil>())
      .def("pid", &PythonCommunicator::pid);
}

}  // namespace rallypoint::python
