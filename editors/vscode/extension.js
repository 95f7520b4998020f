// Starts the language server when a policy is opened: everything but colours and snippets is its work.

const {workspace} = require("vscode");
const {LanguageClient} = require("vscode-languageclient/node");

let client;

exports.activate = () => {
  const [command, ...args] = workspace.getConfiguration("kvdsl").get("command");
  client = new LanguageClient("kvdsl", {command, args}, {documentSelector: [{language: "kv"}]});
  return client.start();
};

exports.deactivate = () => client?.stop();
