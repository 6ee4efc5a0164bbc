#include "protocol.h"

#include <cstring>

namespace guardian {
namespace {

// Takes one NUL-terminated string from [cursor, end), or returns nullptr.
char* take_string(char*& cursor, const char* end) {
  auto* stop = static_cast<char*>(memchr(cursor, '\0', static_cast<size_t>(end - cursor)));
  if (stop == nullptr) return nullptr;
  char* start = cursor;
  cursor = stop + 1;
  return start;
}

bool take_strings(char*& cursor, const char* end, uint32_t count, std::vector<char*>& out) {
  // Each string takes at least its NUL: this bounds `count` before memory is taken for it.
  if (count > static_cast<size_t>(end - cursor)) return false;
  out.reserve(count + 1);
  for (uint32_t i = 0; i < count; ++i) {
    char* text = take_string(cursor, end);
    if (text == nullptr) return false;
    out.push_back(text);
  }
  out.push_back(nullptr);
  return true;
}

}  // namespace

bool parse_spawn(const char* payload, size_t size, SpawnRequest& request) {
  uint32_t head[4];
  if (size < sizeof head) return false;
  memcpy(head, payload, sizeof head);
  request.payload.assign(payload, payload + size);
  request.worker = head[0];
  request.record_slot = head[1];
  char* cursor = request.payload.data() + sizeof head;
  const char* end = request.payload.data() + size;
  request.directory = take_string(cursor, end);
  if (request.directory != nullptr) request.cpus = take_string(cursor, end);
  return request.cpus != nullptr && head[2] > 0 &&
         take_strings(cursor, end, head[2], request.argv) &&
         take_strings(cursor, end, head[3], request.environment) && cursor == end;
}

bool parse_signal(const char* payload, size_t size, SignalRequest& request) {
  if (size != sizeof request) return false;
  memcpy(&request, payload, sizeof request);
  return true;
}

bool parse_fence(const char* payload, size_t size, FenceRequest& request) {
  if (size != sizeof request) return false;
  memcpy(&request, payload, sizeof request);
  return request.until_ns >= 0 && request.pauses <= 1;
}

}  // namespace guardian
