// What /proc says of a process, in one line of numbers.
#pragma once

namespace guardian {

class ProcessLine {
 public:
  // The fields, as proc(5) counts them.
  enum Field : int { kParent = 4, kFlags = 9, kExitCode = 52 };

  explicit ProcessLine(const char* pid);
  // 0 if it is not known.
  long long number(Field field) const;

 private:
  char text_[1024];
  const char* name_end_ = nullptr;
};

}  // namespace guardian
