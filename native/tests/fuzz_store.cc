// For libFuzzer: the data that two clients send to the store, in any interleaving (scripts/fuzz).
//
// A byte of the input says which of them sends how many of the bytes that follow.

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "store/machine.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using rallypoint::store::ConnectionId;
  rallypoint::store::Machine machine;
  ConnectionId clients[2] = {};
  bool is_open[2] = {};
  for (int i = 0; i < 2; ++i) {
    clients[i] = machine.open(0);
    is_open[i] = true;
  }
  std::string_view left(reinterpret_cast<const char*>(data), size);
  while (!left.empty()) {
    const auto how = static_cast<std::uint8_t>(left[0]);
    left.remove_prefix(1);
    const int who = how & 1;
    const std::string_view piece = left.substr(0, how >> 1 == 127 ? left.size() : how >> 1);
    left.remove_prefix(piece.size());
    if (!is_open[who]) continue;
    const char* reason = machine.receive(clients[who], piece);
    while (reason == nullptr && machine.paused(clients[who])) {
      auto& output = machine.pending_output(clients[who]);
      output.consume(output.pending());
      reason = machine.resume(clients[who]);
    }
    if (reason != nullptr) {
      machine.close(clients[who]);
      is_open[who] = false;
    }
    machine.take_touched();
  }
  for (int i = 0; i < 2; ++i) {
    if (is_open[i]) machine.close(clients[i]);
  }
  return 0;
}
