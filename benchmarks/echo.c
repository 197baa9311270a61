/* The floor of a request over HTTP: a server on one core that reads POST /echo/N/U with Content-Length, computes
 * for U microseconds, and answers N bytes of zeros. It understands nothing else, and waits for a connection that
 * does not read. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ROOM = 4 << 20, CONNECTIONS = 1024 };
static struct { char *text; size_t have; } connections[CONNECTIONS];
static char answer[128 + ROOM];

static void quit(const char *why) { perror(why), exit(1); }

static void send_all(int fd, const char *bytes, size_t size) {
    for (ssize_t sent; size; bytes += sent, size -= sent)
        if ((sent = write(fd, bytes, size)) < 0) return; /* it has gone */
}

/* Computes for so long by the process's own time, however often it is interrupted. */
static void compute(double seconds) {
    struct timespec begin, now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    do clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    while (now.tv_sec - begin.tv_sec + 1e-9 * (now.tv_nsec - begin.tv_nsec) < seconds);
}

/* Answers each request that is whole; the rest of the bytes stays. */
static void answer_whole(int fd) {
    char *text = connections[fd].text, *end;
    while ((text[connections[fd].have] = 0, end = strstr(text, "\r\n\r\n"))) {
        char *length = strcasestr(text, "\r\ncontent-length:");
        size_t size = end + 4 - text + (length && length < end ? strtoul(length + 17, NULL, 10) : 0);
        if (size > ROOM || connections[fd].have < size) return;
        char *rest;
        size_t out = strtoul(strstr(text, "/echo/") + 6, &rest, 10);
        if (*rest == '/') compute(1e-6 * strtod(rest + 1, NULL));
        if (out > ROOM) quit("an answer is too long");
        int head = sprintf(answer, "HTTP/1.1 200 OK\r\ncontent-length: %zu\r\n\r\n", out);
        memset(answer + head, 0, 64);
        send_all(fd, answer, head + out);
        memmove(text, text + size, connections[fd].have -= size);
    }
}

static void read_some(int fd) {
    if (!connections[fd].text) connections[fd].text = malloc(ROOM + 1);
    ssize_t got = read(fd, connections[fd].text + connections[fd].have, ROOM - connections[fd].have);
    if (got <= 0) {
        connections[fd].have = 0;
        close(fd);
        return;
    }
    connections[fd].have += got;
    answer_whole(fd);
}

int main(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int one = 1, listening = socket(AF_INET, SOCK_STREAM, 0), poll = epoll_create1(0);
    if (bind(listening, (void *)&at, size) || listen(listening, 256)) quit("listen");
    getsockname(listening, (void *)&at, &size);
    printf("the echo serves on http://127.0.0.1:%d\n", ntohs(at.sin_port)), fflush(stdout);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listening}, events[64];
    epoll_ctl(poll, EPOLL_CTL_ADD, listening, &event);
    for (;;) {
        int ready = epoll_wait(poll, events, 64, -1);
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd != listening) {
                read_some(fd);
                continue;
            }
            if ((fd = accept(listening, NULL, NULL)) < 0 || fd >= CONNECTIONS) quit("accept");
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            event.data.fd = fd;
            epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event);
        }
    }
}
