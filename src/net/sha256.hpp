#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace accelerate::net {

using Digest = std::array<std::uint8_t, 32>;

/// SHA-256 (FIPS 180-4). Written here because neither LibTorch nor a bare Debian brings one that a
/// program can link; a handshake needs a few hundred bytes of it.
Digest sha256(std::string_view bytes);

/// HMAC with SHA-256 (RFC 2104).
Digest hmac_sha256(std::string_view key, std::string_view message);

/// Takes equally long whatever the two differ in.
bool equal_in_constant_time(std::string_view one, std::string_view other);

}  // namespace accelerate::net
