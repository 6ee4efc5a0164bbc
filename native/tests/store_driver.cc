// Drives the store under a sanitizer: requests with bytes changed through a Machine, then a Server
// whose clients come, go and misbehave from several threads. Usage: store_driver CASES SECONDS

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "store/machine.h"
#include "store/server.h"

namespace {

using rallypoint::store::ConnectionId;
using rallypoint::store::Machine;
using rallypoint::store::Server;
using Random = std::mt19937_64;

std::string number(uint64_t value) { return {reinterpret_cast<char*>(&value), sizeof value}; }
std::string blob(const std::string& bytes) { return number(bytes.size()) + bytes; }
std::string request(int opcode, const std::string& body) {
  return static_cast<char>(opcode) + body;
}

const std::string kHello = std::string("\0\xCE\xF7\x85\x3C", 5);
const std::string kProbe = std::string("\x0D\x01\x00\xA1\xF5", 5);

std::vector<std::string> samples() {
  const std::string large(3000, 'x');
  return {
      request(1, blob("/k") + blob(large)),
      request(2, blob("/k") + blob("") + blob("new")),
      request(3, blob("/k")),
      request(4, blob("/n") + number(3)),
      request(5, number(2) + blob("/a") + blob("/k")),
      request(6, number(2) + blob("/a") + blob("/b")),
      request(8, blob("/a")),
      request(9, blob("/k") + blob("more")),
      request(10, number(2) + blob("/a") + blob("/k")),
      request(11, number(2) + blob("/a") + blob("1") + blob("/b") + blob("2")),
      request(12, ""),
      request(14, blob("/q") + blob("item")),
      request(15, blob("/q")),
      request(17, ""),
      request(18, blob("/barrier") + number(2)),
      request(64, number(2) + blob("/a") + blob("/k")),
      request(65, blob("/q")),
      request(66, blob("/e") + blob("mine")),
      request(67, blob("/")),
      request(68, blob("/job") + number(1)),
      request(68, blob("/job") + number(2)),
  };
}

std::string hostile(Random& random, const std::vector<std::string>& seeds) {
  std::string stream = kHello + (random() % 3 ? kProbe : "");
  for (uint64_t n = random() % 6 + 1; n > 0; --n) stream += seeds[random() % seeds.size()];
  for (uint64_t n = random() % 4; n > 0; --n) {
    const size_t place = random() % stream.size();
    if (random() % 2) {
      stream[place] = static_cast<char>(random());
    } else {
      stream.erase(place, random() % 9 + 1);
    }
    if (stream.empty()) stream = "x";
  }
  return stream;
}

void drain(Machine& machine) {
  for (ConnectionId id : std::vector<ConnectionId>(machine.take_touched())) {
    auto& output = machine.pending_output(id);
    while (output.pending() > 0) {
      iovec pieces[8];
      size_t size = 0;
      for (int i = 0, count = output.pieces(pieces, 8); i < count; ++i) {
        size += pieces[i].iov_len;
        std::string copy(static_cast<char*>(pieces[i].iov_base), pieces[i].iov_len);
      }
      output.consume(size);
    }
  }
}

void fuzz(long cases) {
  Random random(20260401);
  const auto seeds = samples();
  Machine machine;
  std::vector<ConnectionId> open;
  for (long i = 0; i < cases; ++i) {
    const ConnectionId id = machine.open(0);
    std::string stream = hostile(random, seeds);
    const char* reason = nullptr;
    while (!stream.empty() && !reason) {
      const size_t size = random() % stream.size() + 1;
      const std::string piece(stream, 0, size);  // its own block, so that overruns are seen
      reason = machine.receive(id, piece);
      stream.erase(0, size);
    }
    drain(machine);
    if (reason || random() % 2) {
      machine.close(id);
    } else {
      open.push_back(id);
    }
    while (open.size() > 20) {  // in any order
      const size_t victim = random() % open.size();
      machine.close(open[victim]);
      open.erase(open.begin() + static_cast<long>(victim));
    }
  }
}

int connect_to(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

void misbehave(uint16_t port, unsigned seed, std::chrono::steady_clock::time_point until) {
  Random random(seed);
  const auto seeds = samples();
  char reply[4096];
  while (std::chrono::steady_clock::now() < until) {
    const int fd = connect_to(port);
    if (fd < 0) continue;
    for (uint64_t n = random() % 4 + 1; n > 0; --n) {
      const std::string stream = hostile(random, seeds);
      if (send(fd, stream.data(), stream.size(), MSG_NOSIGNAL) < 0) break;
      if (recv(fd, reply, sizeof reply, MSG_DONTWAIT) == 0) break;
    }
    close(fd);
  }
}

void serve(int seconds) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, 100) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    std::perror("listen");
    std::exit(1);
  }
  const uint16_t port = ntohs(address.sin_port);
  constexpr int kSilenceS = 5;
  Server server(listener, -1, "", kSilenceS);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  std::vector<std::thread> clients;
  for (unsigned seed = 1; seed <= 4; ++seed) clients.emplace_back(misbehave, port, seed, until);
  while (std::chrono::steady_clock::now() < until) {
    server.allow({});
    (void)server.counters();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (std::thread& client : clients) client.join();
  std::printf("%llu requests served\n",
              static_cast<unsigned long long>(server.counters().requests));
}

}  // namespace

int main(int argc, char** argv) {
  fuzz(argc > 1 ? std::atol(argv[1]) : 100000);
  serve(argc > 2 ? std::atoi(argv[2]) : 5);
  std::puts("no fault found");
}
