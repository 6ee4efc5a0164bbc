// The module, and the store as Python sees it. Only this file and python/ include nanobind: they
// turn Python objects into plain pointers and sizes and back, and decide nothing.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "python/arena.h"
#include "python/engine.h"
#include "python/foreign.h"
#include "python/gil.h"
#include "python/refusal.h"
#include "python/short_way.h"
#include "sha256.h"
#include "store/machine.h"
#include "store/server.h"

namespace nb = nanobind;

namespace {

namespace store = rallypoint::store;

// The machine as tests drive it: bytes in; (connection, bytes) and reasons out.
class StoreMachine {
 public:
  explicit StoreMachine(nb::bytes token) : machine_(std::string(token.c_str(), token.size())) {}
  uint32_t open(double now, nb::bytes nonce) {
    return machine_.open(now, {nonce.c_str(), nonce.size()});
  }
  nb::object receive(uint32_t id, nb::bytes bytes) {
    const char* reason = machine_.receive(id, {bytes.c_str(), bytes.size()});
    return reason ? nb::cast(reason) : nb::none();
  }
  void close(uint32_t id) { machine_.close(id); }
  bool paused(uint32_t id) const { return machine_.paused(id); }
  nb::list late(double now) const {
    nb::list ids;
    for (uint32_t id : machine_.late(now)) ids.append(id);
    return ids;
  }
  nb::list take_output() {
    nb::list messages;
    for (uint32_t id : machine_.take_touched()) {
      store::Output& output = machine_.pending_output(id);
      std::string whole;
      while (output.pending() > 0) {
        iovec piece[2];
        const int count = output.pieces(piece, 2);
        size_t size = 0;
        for (int i = 0; i < count; ++i) {
          whole.append(static_cast<const char*>(piece[i].iov_base), piece[i].iov_len);
          size += piece[i].iov_len;
        }
        output.consume(size);
      }
      messages.append(nb::make_tuple(id, nb::bytes(whole.data(), whole.size())));
    }
    return messages;
  }

 private:
  store::Machine machine_;
};

// Concatenated addresses of 16 bytes each.
void allow(store::Server& server, nb::bytes packed) {
  std::vector<store::HostAddress> hosts(packed.size() / sizeof(store::HostAddress));
  std::memcpy(hosts.data(), packed.c_str(), hosts.size() * sizeof(store::HostAddress));
  server.allow(std::move(hosts));
}

[[noreturn]] void raise_os_error() {
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

// Sends a short request and returns what one recv reads: a round trip with a single release of the
// GIL. The socket blocks, with time-outs set in the kernel; when one expires, errno is EAGAIN.
nb::bytes exchange(int fd, nb::bytes request) {
  char reply[4096];
  const char* next = request.c_str();
  size_t left = request.size();
  for (;;) {
    ssize_t size = 0;
    {
      const rallypoint::python::WithoutGil released;
      while (left > 0 && (size = send(fd, next, left, MSG_NOSIGNAL)) >= 0) {
        next += size;
        left -= static_cast<size_t>(size);
      }
      if (left == 0) size = recv(fd, reply, sizeof reply, 0);
    }
    if (size >= 0) return nb::bytes(reply, static_cast<size_t>(size));
    if (errno != EINTR) raise_os_error();
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

void bind_store(nb::module_& module) {
  nb::class_<store::Server>(module, "StoreServer")
      .def(
          "__init__",
          [](store::Server* self, int listener, int log, nb::bytes token, int silence_s) {
            std::string secret(token.c_str(), token.size());
            new (self) store::Server(listener, log, std::move(secret), silence_s);
          },
          nb::arg("listener"), nb::arg("log"), nb::arg("token"), nb::arg("silence_s"))
      .def("allow", &allow, nb::arg("hosts"))
      .def("abandon", &store::Server::abandon)
      .def("close", &store::Server::close, nb::call_guard<rallypoint::python::WithoutGil>())
      .def("counters", [](const store::Server& server) {
        const store::Counters counters = server.counters();
        return nb::make_tuple(counters.connections, counters.keys, counters.requests);
      });
  nb::class_<StoreMachine>(module, "StoreMachine")
      .def(nb::init<nb::bytes>(), nb::arg("token") = nb::bytes(""))
      .def("open", &StoreMachine::open, nb::arg("now"), nb::arg("nonce") = nb::bytes(""))
      .def("receive", &StoreMachine::receive, nb::arg("connection"), nb::arg("data"))
      .def("close", &StoreMachine::close, nb::arg("connection"))
      .def("paused", &StoreMachine::paused, nb::arg("connection"))
      .def("late", &StoreMachine::late, nb::arg("now"))
      .def("take_output", &StoreMachine::take_output);
  module.def("exchange", &exchange, nb::arg("fd"), nb::arg("request"));
  module.def("signal_thread", [](int pid, int tid, int number) {
    return syscall(SYS_tgkill, pid, tid, number) == 0 ? 0 : errno;
  });
  module.def("raise_in_thread", [](unsigned long thread, nb::handle exception) {
    return PyThreadState_SetAsyncExc(thread, exception.ptr()) != 0;
  });
  module.def("hmac_sha256", [](nb::bytes key, nb::bytes message) {
    const rallypoint::Digest digest =
        rallypoint::hmac_sha256({key.c_str(), key.size()}, {message.c_str(), message.size()});
    return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
  });
}

}  // namespace

NB_MODULE(_native, module) {
  // PyTorch's C++ keeps what a failed backward pass left until after the interpreter has ended.
  nb::set_leak_warnings(false);
  module.doc() = "Rallypoint's native core.";
  rallypoint::python::bind_arena(module);
  rallypoint::python::bind_engine(module);
  rallypoint::python::bind_foreign(module);
  rallypoint::python::bind_refusals();
  rallypoint::python::bind_short_way(module);
  bind_store(module);
}
