// A signal that makes this process write the stacks of its Python threads, without the GIL: for
// inspecting a stuck worker from outside (launch/inspection/python_stacks.py).
//
// Python's own faulthandler does the writing. It follows pointers of threads that may be running,
// which are occasionally invalid; in a healthy process that must do no harm. So a fault in it ends
// the attempt, not the process. This is a module of its own, because each worker loads it at its
// start: it includes nothing else of the core.
//
//   rallypoint: begin      of each attempt
//   rallypoint: at 0x...   the instruction where this thread was, if it is the main one
//   rallypoint: gil 0x...  the thread that holds the GIL, 0: none; Python 3.11 alone tells
//   Thread 0x... ...
//   rallypoint: end        of one that was not broken off

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>

namespace {

constexpr int kAttempts = 4;
constexpr int kFaults[] = {SIGSEGV, SIGBUS};
constexpr char kBegin[] = "rallypoint: begin\n";
constexpr char kAt[] = "rallypoint: at 0x";
[[maybe_unused]] constexpr char kGil[] = "rallypoint: gil 0x";
constexpr char kEnd[] = "rallypoint: end\n";

using Dump = const char* (*)(int fd, void* interpreter, PyThreadState* thread);

// The function that faulthandler calls. Python 3.11 and 3.12 export it; null in later ones, where
// faulthandler's signal handler must be used: that one cannot be called again after it was
// interrupted.
Dump dump = nullptr;
struct sigaction faulthandlers;
bool is_spent = false;
int memory = -1;

std::atomic_flag is_busy;
std::atomic<bool> is_dumping;
pthread_t dumper;
sigjmp_buf way_out;
struct sigaction before[std::size(kFaults)];

void say(const char* text, std::size_t size) {
  [[maybe_unused]] const ssize_t written = write(memory, text, size);
}

// With leading zeros, as faulthandler writes threads.
void say_number(const char* name, std::size_t size, std::uintptr_t number) {
  char digits[2 * sizeof number + 1];
  digits[sizeof digits - 1] = '\n';
  for (std::size_t i = sizeof digits - 1; i-- > 0; number /= 16) {
    digits[i] = "0123456789abcdef"[number % 16];
  }
  say(name, size);
  say(digits, sizeof digits);
}

void say_instruction(const void* context) {
  if (getpid() != gettid()) return;
  const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
  std::uintptr_t instruction = 0;
#if defined(__x86_64__)
  instruction = static_cast<std::uintptr_t>(machine.gregs[REG_RIP]);
#elif defined(__aarch64__)
  instruction = machine.pc;
#endif
  if (instruction != 0) say_number(kAt, sizeof kAt - 1, instruction);
}

// From 3.12 on, the function returns the calling thread's own state.
void say_gil() {
#if PY_VERSION_HEX < 0x030C0000
  const PyThreadState* holder = _PyThreadState_UncheckedGet();
  say_number(kGil, sizeof kGil - 1, holder == nullptr ? 0 : holder->thread_id);
#endif
}

void faulted(int number, siginfo_t* info, void*) {
  if (is_dumping.load() && pthread_equal(pthread_self(), dumper)) siglongjmp(way_out, 1);
  // The program's own fault, on another thread: handle it as if we were not here.
  for (std::size_t i = 0; i < std::size(kFaults); ++i) {
    if (kFaults[i] == number) sigaction(number, &before[i], nullptr);
  }
  if (info->si_code <= 0) raise(number);  // it was sent, and would not occur again by itself
}

void catch_faults() {
  struct sigaction ours{};
  ours.sa_sigaction = faulted;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigset_t faults;
  sigemptyset(&faults);
  for (std::size_t i = 0; i < std::size(kFaults); ++i) {
    sigaction(kFaults[i], &ours, &before[i]);
    sigaddset(&faults, kFaults[i]);
  }
  pthread_sigmask(SIG_UNBLOCK, &faults, nullptr);  // until the handler returns
}

void leave_faults() {
  for (std::size_t i = 0; i < std::size(kFaults); ++i) {
    struct sigaction now{};
    sigaction(kFaults[i], nullptr, &now);
    if (now.sa_sigaction == faulted) sigaction(kFaults[i], &before[i], nullptr);
  }
}

void write_stacks(int number) {
  if (dump != nullptr) {
    dump(memory, nullptr, PyGILState_GetThisThreadState());
  } else {
    is_spent = true;
    faulthandlers.sa_handler(number);
    is_spent = false;
  }
}

void asked(int number, siginfo_t*, void* context) {
  if (is_busy.test_and_set()) return;  // on another thread
  const int error = errno;
  dumper = pthread_self();
  catch_faults();
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    say(kBegin, sizeof kBegin - 1);
    if (is_spent) break;
    if (sigsetjmp(way_out, 1) == 0) {
      is_dumping = true;
      say_instruction(context);
      say_gil();
      write_stacks(number);
      is_dumping = false;
      say(kEnd, sizeof kEnd - 1);
      break;
    }
    is_dumping = false;
  }
  leave_faults();
  errno = error;
  is_busy.clear();
}

bool handle(int number) {
  struct sigaction ours{};
  ours.sa_sigaction = asked;
  ours.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  return sigaction(number, &ours, &faulthandlers) == 0;
}

// answer(number, fd): from now on the signal `number` makes this process write stacks to `fd`.
// False: faulthandler must first be registered for that signal.
PyObject* answer(PyObject*, PyObject* arguments) {
  int number = 0;
  int descriptor = -1;
  if (!PyArg_ParseTuple(arguments, "ii", &number, &descriptor)) return nullptr;
  dump = reinterpret_cast<Dump>(dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
  struct sigaction now{};
  const bool is_registered = sigaction(number, nullptr, &now) == 0 && now.sa_handler != SIG_DFL;
  if (dump == nullptr && !is_registered) Py_RETURN_FALSE;
  memory = descriptor;
  if (!handle(number)) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {{"answer", answer, METH_VARARGS, nullptr}, {}};
PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_stacks", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__stacks() { return PyModule_Create(&module_definition); }
