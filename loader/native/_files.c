/* Files of a folder that only its owner can change, opened as loader/versions/folder.py does. */
#define _GNU_SOURCE /* O_PATH, MAP_ANONYMOUS */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "_attach.h"

enum { HUGE_PAGE_BYTES = 2 << 20 };

int refuse(const reason *why, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (why->bytes) vsnprintf(why->text, why->bytes, format, arguments);
    va_end(arguments);
    return 0;
}

/* Opens what is a folder or a plain file of this user or root, which others cannot change; -1: refused, -2: it
 * is not there. */
static int open_trusted(int folder, const char *name, int flags, struct stat *found, const reason *why) {
    const int is_folder = flags & O_DIRECTORY;
    const int fd = openat(folder, name, flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return -2;
    if (fd < 0) return refuse(why, "%s: %s; expected a %s", name, strerror(errno), is_folder ? "folder" : "file") - 1;
    if (fstat(fd, found)) refuse(why, "%s: %s", name, strerror(errno));
    else if (!is_folder && !S_ISREG(found->st_mode)) refuse(why, "%s is no file; remove it", name);
    else if (found->st_uid && found->st_uid != geteuid())
        refuse(why, "%s belongs to user %u, who could put anything there; run as that user", name, found->st_uid);
    else if ((found->st_mode & (S_IWGRP | S_IWOTH)) && !(folder == AT_FDCWD && (found->st_mode & S_ISVTX)))
        refuse(why, "%s has mode %04o: other users can change it; chmod go-w", name, found->st_mode & 07777);
    else return fd;
    close(fd);
    return -1;
}

int open_folder(const char *root, const char *model, const reason *why) {
    struct stat found;
    char path[4096]; /* a slash behind a link would follow it */
    int folder = -1;
    size_t length = strlen(root);
    while (length > 1 && root[length - 1] == '/') length--;
    if (length >= sizeof path) return refuse(why, "root %.99s...: a path of %zu bytes", root, length) - 1;
    memcpy(path, root, length), path[length] = 0;
    if (!*model || strspn(model, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") != strlen(model))
        return refuse(why, "model '%.99s': expected letters, digits, _ and -", model) - 1;
    const int above = open_trusted(AT_FDCWD, path, O_DIRECTORY | O_PATH, &found, why);
    if (above >= 0) {
        folder = open_trusted(above, model, O_DIRECTORY | O_RDONLY, &found, why);
        close(above);
    }
    if (above == -2 || folder == -2) refuse(why, "model %s is not published in %s", model, root);
    return above < 0 || folder < 0 ? -1 : folder;
}

int64_t read_file(int folder, const char *name, char *to, int64_t bytes, const reason *why) {
    struct stat found;
    const int fd = open_trusted(folder, name, O_RDONLY, &found, why);
    if (fd < 0) return fd;
    const int64_t count = read(fd, to, (size_t)bytes - 1);
    if (count < 0) refuse(why, "%s: %s", name, strerror(errno));
    else to[count] = 0;
    close(fd);
    return count;
}

int map_file(int folder, const char *name, mapping *to, const reason *why) {
    struct stat found;
    const int fd = open_trusted(folder, name, O_RDONLY, &found, why);
    if (fd < 0) return fd;
    const size_t page = found.st_blksize > HUGE_PAGE_BYTES ? (size_t)found.st_blksize : HUGE_PAGE_BYTES;
    *to = (mapping){.size = found.st_size, .span_bytes = (size_t)found.st_size + page};
    to->span = mmap(NULL, to->span_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (to->span == MAP_FAILED) to->span = NULL;
    if (to->span && found.st_size) {
        void *const at = (void *)(((uintptr_t)to->span + page - 1) / page * page);
        if (mmap(at, (size_t)found.st_size, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == at) to->bytes = at;
    }
    if (!to->bytes)
        refuse(why, "%s: cannot map %lld bytes: %s", name, (long long)to->size,
               to->size ? strerror(errno) : "the segment is damaged; publish the version again");
    if (!to->bytes && to->span) munmap(to->span, to->span_bytes);
    close(fd);
    return to->bytes ? 1 : -1;
}

void unmap_file(mapping *of) {
    if (of->bytes) munmap(of->span, of->span_bytes);
    of->bytes = NULL;
}
