// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for challenges with the job token. Messages are short;
// nothing here is tuned.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace rallypoint {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view message);
Digest hmac_sha256(std::string_view key, std::string_view message);

// Takes the same time wherever the first difference is.
bool equal_in_constant_time(std::string_view a, std::string_view b);

inline std::string_view view(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace rallypoint
