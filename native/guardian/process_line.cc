#include "process_line.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace guardian {

ProcessLine::ProcessLine(const char* pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  const ssize_t got = read(fd, text_, sizeof text_ - 1);
  close(fd);
  if (got <= 0) return;
  text_[got] = '\0';
  name_end_ = strrchr(text_, ')');  // the name may hold spaces and brackets itself
}

long long ProcessLine::number(Field field) const {
  const char* at = name_end_;
  for (int passed = 2; at != nullptr && passed < field; ++passed) at = strchr(at + 1, ' ');
  return at == nullptr ? 0 : strtoll(at, nullptr, 10);
}

}  // namespace guardian
