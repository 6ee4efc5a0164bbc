// The one file that includes nanobind. It turns Python objects into plain pointers and sizes and
// back, and decides nothing.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "engine/communicator.h"
#include "sha256.h"
#include "store/machine.h"
#include "store/server.h"

namespace nb = nanobind;

namespace {

using namespace rallypoint;

// Holds the GIL for short waits, gives it up for long ones, and lets Ctrl-C through.
class PythonHost final : public Host {
 public:
  ~PythonHost() override { resume(); }
  void before_wait() override {
    if (thread_ == nullptr) thread_ = PyEval_SaveThread();
  }
  bool is_interrupted() override {
    const bool released = thread_ != nullptr;
    resume();
    const bool interrupted = PyErr_CheckSignals() != 0;
    if (released && !interrupted) before_wait();
    return interrupted;
  }
  void resume() {
    if (thread_ != nullptr) PyEval_RestoreThread(thread_);
    thread_ = nullptr;
  }

 private:
  PyThreadState* thread_ = nullptr;
};

class View {
 public:
  View(nb::handle object, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    held_ = PyObject_GetBuffer(object.ptr(), &buffer_, flags) == 0;
    if (!held_) PyErr_Clear();
  }
  ~View() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(buffer_.buf); }
  std::uint64_t bytes() const { return static_cast<std::uint64_t>(buffer_.len); }
  std::optional<DType> dtype() const {
    if (!held_ || buffer_.format == nullptr || std::strlen(buffer_.format) != 1) return {};
    switch (buffer_.format[0]) {
      case 'f':
        return DType::float32;
      case 'd':
        return DType::float64;
      case 'i':
        return DType::int32;
      case 'l':
      case 'q':
        return buffer_.itemsize == 8 ? DType::int64 : DType::int32;
      default:
        return {};
    }
  }

 private:
  Py_buffer buffer_{};
  bool held_ = false;
};

constexpr int kBadBuffer = -1;
constexpr std::uint64_t kLongBytes = 32 << 10;  // from here on other threads may run meanwhile

class PythonCommunicator {
 public:
  PythonCommunicator(int fd, std::uint32_t rank, std::uint32_t ranks, unsigned spins,
                     unsigned yields, nb::callable plan, double timeout_s)
      : communicator_(fd, rank, ranks, {spins, yields}),
        plan_(std::move(plan)),
        timeout_s_(timeout_s) {}

  int watch_peers() { return communicator_.region().watch_peers(); }

  int run(std::uint32_t collective, std::uint32_t op, std::uint32_t root, nb::handle input,
          nb::handle output) {
    const View source(input, false);
    const View target(output, true);
    const std::optional<DType> dtype = source.dtype();
    if (!dtype || target.dtype() != dtype || op >= kReduceOps) return kBadBuffer;
    const Region& region = communicator_.region();
    const std::uint64_t bytes = common_bytes(source.bytes(), target.bytes());
    const Program& program = planned(collective, root, bytes, region.rank(), region.ranks());
    const std::uint64_t block = program.output_blocks > 0
                                    ? target.bytes() / program.output_blocks
                                    : source.bytes() / std::max(program.input_blocks, 1u);
    const std::uint64_t item = item_bytes(*dtype);
    if (!holds(source, program.input_blocks, block) ||
        !holds(target, program.output_blocks, block) || block % item != 0) {
      return kBadBuffer;
    }
    const Call call{&program,
                    {static_cast<std::uint16_t>(collective), *dtype, static_cast<ReduceOp>(op),
                     static_cast<std::int32_t>(root)},
                    block / item,
                    source.data(),
                    target.data(),
                    timeout_s_};
    return finish(communicator_.collective(), call, bytes);
  }

  int run_pair(std::uint32_t collective, std::uint32_t from, std::uint32_t to, std::int32_t tag,
               nb::handle buffer) {
    const bool sends = communicator_.region().rank() == from;
    const std::uint32_t role = sends ? 0 : 1;
    const View view(buffer, !sends);
    const std::optional<DType> dtype = view.dtype();
    if (!dtype) return kBadBuffer;
    const Call call{&planned(collective, role, view.bytes(), role, 2),
                    {static_cast<std::uint16_t>(collective), *dtype, ReduceOp::sum, tag},
                    view.bytes() / item_bytes(*dtype),
                    view.data(),
                    view.data(),
                    timeout_s_};
    return finish(communicator_.pair(from, to), call, view.bytes());
  }

  nb::object trouble() {
    Region& region = communicator_.region();
    if (!region.poisoned()) return nb::none();
    Poison& poison = region.poison();
    while (poison.state.load(std::memory_order_acquire) != 2) {
    }
    return nb::make_tuple(static_cast<int>(poison.trouble), poison.culprit, poison.reporter,
                          record(poison.theirs), record(poison.ours));
  }

  void leave() { communicator_.region().leave(); }
  void abort() {
    Region& region = communicator_.region();
    region.spread(Trouble::aborted, static_cast<std::int32_t>(region.rank()), nullptr, nullptr);
  }
  std::int32_t pid(std::uint32_t rank) { return communicator_.region().state(rank).pid.load(); }

 private:
  // The size that programs are chosen by: the same on every rank, whether or not it is the root.
  static std::uint64_t common_bytes(std::uint64_t input, std::uint64_t output) {
    return input == 0 || output == 0 ? input + output : std::min(input, output);
  }

  // A buffer that the program does not use may be anything.
  static bool holds(const View& view, std::uint64_t blocks, std::uint64_t block) {
    return blocks == 0 || view.bytes() == blocks * block;
  }

  static int finish(Executor& executor, const Call& call, std::uint64_t bytes) {
    PythonHost host;
    if (bytes >= kLongBytes) host.before_wait();
    std::unique_lock lock(executor.mutex, std::try_to_lock);
    if (!lock) {
      host.before_wait();  // its owner may need the GIL to get on
      lock.lock();
    }
    const Trouble trouble = executor.run(call, host);
    lock.unlock();
    host.resume();
    if (trouble == Trouble::interrupted && PyErr_Occurred()) throw nb::python_error();
    return static_cast<int>(trouble);
  }

  const Program& planned(std::uint32_t collective, std::uint32_t root, std::uint64_t bytes,
                         std::uint32_t rank, std::uint32_t ranks) {
    const std::uint64_t kind = Communicator::kind(collective, root, bytes);
    if (const Program* known = communicator_.find(kind)) return *known;
    const auto words = nb::cast<nb::bytes>(plan_(collective, root, bytes));
    const std::string error = communicator_.teach(
        kind, {static_cast<const std::int32_t*>(words.data()), words.size() / sizeof(std::int32_t)},
        rank, ranks);
    if (!error.empty()) throw nb::value_error(error.c_str());
    return *communicator_.find(kind);
  }

  static nb::object record(const CallRecord& record) {
    const std::uint64_t number = record.number.load();
    if (number == 0) return nb::none();
    return nb::make_tuple(number - 1, record.collective, record.reduce_op, record.dtype,
                          record.root, record.count);
  }

  Communicator communicator_;
  nb::callable plan_;
  double timeout_s_;
};

void bind_engine(nb::module_& module) {
  module.def("region_bytes", [](std::uint32_t ranks) { return rallypoint::Layout(ranks).bytes(); });
  nb::class_<PythonCommunicator>(module, "Communicator")
      .def(nb::init<int, std::uint32_t, std::uint32_t, unsigned, unsigned, nb::callable, double>(),
           nb::arg("fd"), nb::arg("rank"), nb::arg("ranks"), nb::arg("spins"), nb::arg("yields"),
           nb::arg("plan"), nb::arg("timeout_s"))
      .def("watch_peers", &PythonCommunicator::watch_peers)
      .def("run", &PythonCommunicator::run)
      .def("run_pair", &PythonCommunicator::run_pair)
      .def("trouble", &PythonCommunicator::trouble)
      .def("leave", &PythonCommunicator::leave)
      .def("abort", &PythonCommunicator::abort)
      .def("pid", &PythonCommunicator::pid);
}

namespace store = rallypoint::store;

// The machine as the tests drive it: bytes in; (connection, bytes) and reasons out.
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

// Addresses of 16 bytes each, one after the other.
void allow(store::Server& server, nb::bytes packed) {
  std::vector<store::HostAddress> hosts(packed.size() / sizeof(store::HostAddress));
  std::memcpy(hosts.data(), packed.c_str(), hosts.size() * sizeof(store::HostAddress));
  server.allow(std::move(hosts));
}

[[noreturn]] void raise_os_error() {
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

// Sends a short request and returns what one recv brings: a round trip for one change of the GIL.
// The socket blocks and has its time-outs set in the kernel; when one is over, errno is EAGAIN.
nb::bytes exchange(int fd, nb::bytes request) {
  char reply[4096];
  const char* next = request.c_str();
  size_t left = request.size();
  for (;;) {
    ssize_t size = 0;
    {
      const nb::gil_scoped_release released;
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
          [](store::Server* self, int listener, int log, nb::bytes token) {
            new (self) store::Server(listener, log, std::string(token.c_str(), token.size()));
          },
          nb::arg("listener"), nb::arg("log"), nb::arg("token"))
      .def("allow", &allow, nb::arg("hosts"))
      .def("abandon", &store::Server::abandon)
      .def("close", &store::Server::close, nb::call_guard<nb::gil_scoped_release>())
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
  module.def("hmac_sha256", [](nb::bytes key, nb::bytes message) {
    const rallypoint::Digest digest =
        rallypoint::hmac_sha256({key.c_str(), key.size()}, {message.c_str(), message.size()});
    return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
  });
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "Rallypoint's native core.";
  bind_engine(module);
  bind_store(module);
}
