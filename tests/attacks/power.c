/* Loaded into a process before all others (LD_PRELOAD): writes down everything that changes files below one directory,
 * in the order in which it happens. tests/attacks/power.py reads it.
 *
 * An entry: kind (1), flags (1), length of the name (2), inode (8), offset (8), length of the data (8), name, data.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 'c', MKDIR = 'd', WRITE = 'w', TRUNCATE = 't', SYNC = 's', LINK = 'l', UNLINK = 'u', RENAME = 'r', MARK = 'm' };
enum { DSYNC = 1 };

struct __attribute__((packed)) head {
    uint8_t kind, flags;
    uint16_t name;
    uint64_t inode, offset, data;
};

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static char below[PATH_MAX];
static size_t below_length;
static int journal = -1;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static void put(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t n = syscall(SYS_write, journal, at, size);
        if (n < 0) abort();
        at += n, size -= n;
    }
}

static void note(uint8_t kind, uint8_t flags, uint64_t inode, uint64_t offset, const char *name, const void *data, size_t size) {
    struct head head = {kind, flags, name ? strlen(name) : 0, inode, offset, size};
    put(&head, sizeof head);
    if (name) put(name, head.name);
    put(data, size);
}

/* Whether what follows is written down; then nobody else changes anything until `leave`. */
static int enter(void) {
    if (journal < 0) return 0;
    pthread_mutex_lock(&turn);
    return 1;
}

static void leave(void) {
    pthread_mutex_unlock(&turn);
}

static int is_below(const char *path) {
    return journal >= 0 && !strncmp(path, below, below_length) && (path[below_length] == '/' || !path[below_length]);
}

/* The absolute path of a name, if it is below the directory. */
static int resolve(int directory, const char *path, char *absolute) {
    char base[PATH_MAX], link[64];
    if (journal < 0 || !path) return 0;
    if (*path == '/') return snprintf(absolute, PATH_MAX, "%s", path) < PATH_MAX && is_below(absolute);
    if (directory == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t n = readlink(link, base, sizeof base - 1);
        if (n < 0) return 0;
        base[n] = 0;
    }
    return snprintf(absolute, PATH_MAX, "%s/%s", base, path) < PATH_MAX && is_below(absolute);
}

/* The inode behind a descriptor, if it is a file or directory below ours. */
static uint64_t inode_of(int fd) {
    char link[64], path[PATH_MAX];
    struct stat status;
    if (journal < 0 || fd == journal) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return is_below(path) && !fstat(fd, &status) ? status.st_ino : 0;
}

static uint64_t inode_at(const char *path) {
    struct stat status;
    return lstat(path, &status) ? 0 : status.st_ino;
}

static int is_dsync(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_DSYNC) ? DSYNC : 0;
}

/* -- called by the tests ------------------------------------------------------------------------------------------- */

/* Begin. */
void power_start(const char *directory, const char *path) {
    strncpy(below, directory, sizeof below - 1);
    below_length = strlen(below);
    journal = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (journal < 0) abort();
}

void power_mark(const char *text) {
    if (journal < 0) return;
    pthread_mutex_lock(&turn);
    note(MARK, 0, 0, 0, NULL, text, strlen(text));
    pthread_mutex_unlock(&turn);
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static int opening(int directory, const char *path, int flags, mode_t mode) {
    REAL(openat);
    char absolute[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !resolve(directory, path, absolute) || !enter())
        return real(directory, path, flags, mode);
    int is_there = inode_at(absolute) != 0;
    int fd = real(directory, path, flags, mode);
    if (fd >= 0 && !is_there) note(CREATE, 0, inode_of(fd), 0, absolute, NULL, 0);
    if (fd >= 0 && is_there && flags & O_TRUNC) note(TRUNCATE, is_dsync(fd), inode_of(fd), 0, NULL, NULL, 0);
    leave();
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *path, int flags, ...) { MODE(flags) return opening(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opening(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) return opening(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) return opening(at, path, flags, mode); }

/* -- bytes --------------------------------------------------------------------------------------------------------- */

static void wrote(int fd, uint64_t inode, const struct iovec *parts, int n_parts, off_t offset, ssize_t written) {
    uint64_t left = written > 0 ? written : 0;
    for (int i = 0; i < n_parts && left; i++) {
        size_t size = parts[i].iov_len < left ? parts[i].iov_len : left;
        note(WRITE, is_dsync(fd), inode, offset, NULL, parts[i].iov_base, size);
        offset += size, left -= size;
    }
}

static ssize_t writing(int fd, const struct iovec *parts, int n_parts, off_t offset, int is_positioned) {
    REAL(pwritev);
    static ssize_t (*append)(int, const struct iovec *, int);
    if (!append) append = (ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
    uint64_t inode = inode_of(fd);
    int is_ours = inode && enter();
    ssize_t written = is_positioned ? real(fd, parts, n_parts, offset) : append(fd, parts, n_parts);
    if (is_ours) {
        int error = errno;
        if (!is_positioned) offset = lseek(fd, 0, SEEK_CUR) - (written > 0 ? written : 0);
        wrote(fd, inode, parts, n_parts, offset, written);
        errno = error;
        leave();
    }
    return written;
}

ssize_t write(int fd, const void *data, size_t size) {
    struct iovec one = {(void *)data, size};
    return writing(fd, &one, 1, 0, 0);
}
ssize_t writev(int fd, const struct iovec *parts, int n) { return writing(fd, parts, n, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    struct iovec one = {(void *)data, size};
    return writing(fd, &one, 1, offset, 1);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    struct iovec one = {(void *)data, size};
    return writing(fd, &one, 1, offset, 1);
}
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t offset) { return writing(fd, parts, n, offset, 1); }
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off64_t offset) { return writing(fd, parts, n, offset, 1); }

static int resizing(int fd, off_t size) {
    REAL(ftruncate);
    uint64_t inode = inode_of(fd);
    int is_ours = inode && enter();
    int failed = real(fd, size);
    if (is_ours) {
        if (!failed) note(TRUNCATE, is_dsync(fd), inode, size, NULL, NULL, 0);
        leave();
    }
    return failed;
}
int ftruncate(int fd, off_t size) { return resizing(fd, size); }
int ftruncate64(int fd, off64_t size) { return resizing(fd, size); }

/* Zeros over a range; whoever wants more than that is told that the file system has no such thing. */
static int punching(int fd, int mode, off_t offset, off_t size) {
    REAL(fallocate);
    uint64_t inode = inode_of(fd);
    if (!inode) return real(fd, mode, offset, size);
    if (mode != (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE)) return errno = EOPNOTSUPP, -1;
    int is_ours = enter();
    int failed = real(fd, mode, offset, size);
    if (is_ours) {
        struct stat status;
        off_t end = fstat(fd, &status) || offset + size < status.st_size ? offset + size : status.st_size;
        void *zeros = !failed && end > offset ? calloc(1, end - offset) : NULL;
        if (zeros) note(WRITE, 0, inode, offset, NULL, zeros, end - offset);
        free(zeros);
        leave();
    }
    return failed;
}
int fallocate(int fd, int mode, off_t offset, off_t size) { return punching(fd, mode, offset, size); }
int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return punching(fd, mode, offset, size); }
int posix_fallocate(int fd, off_t offset, off_t size) {
    REAL(posix_fallocate);
    return inode_of(fd) ? EOPNOTSUPP : real(fd, offset, size);
}

/* -- syncing ------------------------------------------------------------------------------------------------------- */

static int syncing(int fd, int (*real)(int)) {
    uint64_t inode = inode_of(fd);
    int is_ours = inode && enter();
    int failed = real(fd);
    if (is_ours) {
        if (!failed) note(SYNC, 0, inode, 0, NULL, NULL, 0);
        leave();
    }
    return failed;
}
int fsync(int fd) { REAL(fsync); return syncing(fd, real); }
int fdatasync(int fd) { REAL(fdatasync); return syncing(fd, real); }

/* -- names --------------------------------------------------------------------------------------------------------- */

static int naming(int kind, int from_at, const char *from, int to_at, const char *to, int flags) {
    char old[PATH_MAX], new[PATH_MAX];
    long call = kind == LINK ? SYS_linkat : kind == RENAME ? SYS_renameat2 : kind == MKDIR ? SYS_mkdirat : SYS_unlinkat;
    int is_ours = resolve(from_at, from, old) && (!to || resolve(to_at, to, new)) && enter();
    uint64_t inode = is_ours ? inode_at(old) : 0;
    int failed = to ? syscall(call, from_at, from, to_at, to, flags) : syscall(call, from_at, from, flags);
    if (is_ours) {
        if (!failed && kind == MKDIR) inode = inode_at(old);
        if (!failed) note(kind, 0, inode, 0, old, to ? new : NULL, to ? strlen(new) : 0);
        leave();
    }
    return failed ? -1 : 0;
}
int unlink(const char *path) { return naming(UNLINK, AT_FDCWD, path, 0, NULL, 0); }
int unlinkat(int at, const char *path, int flags) { return naming(UNLINK, at, path, 0, NULL, flags); }
int rmdir(const char *path) { return naming(UNLINK, AT_FDCWD, path, 0, NULL, AT_REMOVEDIR); }
int mkdir(const char *path, mode_t mode) { return naming(MKDIR, AT_FDCWD, path, 0, NULL, mode); }
int mkdirat(int at, const char *path, mode_t mode) { return naming(MKDIR, at, path, 0, NULL, mode); }
int link(const char *from, const char *to) { return naming(LINK, AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int fa, const char *from, int ta, const char *to, int flags) { return naming(LINK, fa, from, ta, to, flags); }
int rename(const char *from, const char *to) { return naming(RENAME, AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int fa, const char *from, int ta, const char *to) { return naming(RENAME, fa, from, ta, to, 0); }
