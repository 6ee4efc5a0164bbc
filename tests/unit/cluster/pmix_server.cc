// A PMIx library without a server: what is published lies in the file that PMIX_NOTE names, as a
// line for the key and one for the text. PMIX_FAILS names the function that fails.

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

namespace {

constexpr std::uint16_t kString = 3;
constexpr int kFailed = -25, kNotFound = -46;

struct Proc {
  char nspace[256];
  std::uint32_t rank;
};

struct Value {
  std::uint16_t type;
  union {
    char* string;
    char all[24];
  } data;
};

struct Info {
  char key[512];
  std::uint32_t flags;
  Value value;
};

struct Found {
  Proc proc;
  char key[512];
  Value value;
};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int status_of(const char* function) { return variable("PMIX_FAILS") == function ? kFailed : 0; }

}  // namespace

extern "C" {

int PMIx_Init(Proc* proc, Info*, std::size_t) {
  std::strcpy(proc->nspace, "job@1");
  return status_of("PMIx_Init");
}

int PMIx_Publish(const Info* info, std::size_t) {
  const std::string name = variable("PMIX_NOTE");
  std::ofstream(name + ".new") << info->key << '\n' << info->value.data.string << '\n';
  std::rename((name + ".new").c_str(), name.c_str());
  return status_of("PMIx_Publish");
}

int PMIx_Lookup(Found* found, std::size_t, const Info*, std::size_t) {
  std::string key, text;
  std::ifstream file(variable("PMIX_NOTE"));
  if (!std::getline(file, key) || !std::getline(file, text) || key != found->key) return kNotFound;
  found->value.type = variable("PMIX_FAILS") == "type" ? kString + 1 : kString;
  found->value.data.string = strdup(text.c_str());
  return status_of("PMIx_Lookup");
}

int PMIx_Finalize(const Info*, std::size_t) {
  std::ofstream(variable("PMIX_NOTE") + ".left." + std::to_string(getpid()));
  return 0;
}

const char* PMIx_Error_string(int status) { return status == kFailed ? "OUT-OF-ORDER" : "?"; }
}
