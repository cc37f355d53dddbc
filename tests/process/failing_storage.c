// Preloaded into the processes of a job (LD_PRELOAD): calls on chosen files fail with EIO, as those of a dying disk do.
//
// $FAILING_STORAGE names a file, the switch. While it is there and holds "CALLS PATTERN", the calls that the word CALLS
// means (see the functions at the end) fail for paths that match PATTERN. With "CALLS PATTERN ranks" they fail in ranks
// only. Everything else is the C library's, untouched.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

// By system calls: the functions of these names are what is replaced here.
static int read_switch(char* calls, char* pattern, char* whose) {
  const char* path = getenv("FAILING_STORAGE");
  char text[PATH_MAX + 64];
  if (path == NULL) return 0;
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  const long length = syscall(SYS_read, fd, text, sizeof text - 1);
  syscall(SYS_close, fd);
  if (length <= 0) return 0;
  text[length] = 0;
  whose[0] = 0;
  return sscanf(text, "%31s %4095s %15s", calls, pattern, whose) >= 2;
}

static int fails(const char* call, int fd) {
  char calls[32], pattern[PATH_MAX], whose[16], link[32], path[PATH_MAX];
  const int before = errno;
  int on = read_switch(calls, pattern, whose) && strcmp(calls, call) == 0;
  on = on && (strcmp(whose, "ranks") != 0 || getenv("RANK") != NULL);
  if (on) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    on = fnmatch(pattern, path, 0) == 0;
  }
  errno = on ? EIO : before;
  return on;
}

static int is_folder(int fd) {
  struct stat found;
  return fstat(fd, &found) == 0 && S_ISDIR(found.st_mode);
}

#define THE_LIBRARYS(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pwrite64(int fd, const void* data, size_t count, off64_t at) {
  return fails("write", fd) ? -1 : THE_LIBRARYS(pwrite64)(fd, data, count, at);
}

ssize_t pread64(int fd, void* data, size_t count, off64_t at) {
  return fails("read", fd) ? -1 : THE_LIBRARYS(pread64)(fd, data, count, at);
}

ssize_t preadv64v2(int fd, const struct iovec* parts, int count, off64_t at, int flags) {
  return fails("read", fd) ? -1 : THE_LIBRARYS(preadv64v2)(fd, parts, count, at, flags);
}

int fsync(int fd) { return fails(is_folder(fd) ? "sync-folder" : "sync", fd) ? -1 : THE_LIBRARYS(fsync)(fd); }
